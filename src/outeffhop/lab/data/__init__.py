"""Data for the four models: what ships with the package, a path, or a dataset of the Hugging Face hub.

prepared = prepare("builtin:text", "mlm", length=128)
for batch in batches(prepared.validation, prepared.eval_collate, 16): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outeffhop.lab.data.bags import Bags, collate_bags, load_bags
    from outeffhop.lab.data.describing import describe
    from outeffhop.lab.data.preparing import prepare
    from outeffhop.lab.data.samples import Prepared, batches

__all__ = ["Bags", "Prepared", "batches", "collate_bags", "describe", "load_bags", "prepare"]

_HOME = {
    "Bags": "bags",
    "Prepared": "samples",
    "batches": "samples",
    "collate_bags": "bags",
    "describe": "describing",
    "load_bags": "bags",
    "prepare": "preparing",
}


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when a name is used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
