"""Data for the four models: what ships with the package, a path, or a dataset of the Hugging Face hub.

prepared = prepare("builtin:text", "mlm", length=128)
for batch in batches(prepared.validation, prepared.eval_collate, 16): ...
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.lab.data.backcopy import Backcopy
    from outeffhop.lab.data.bags import Bags, collate_bags, load_bags
    from outeffhop.lab.data.describing import describe
    from outeffhop.lab.data.preparing import prepare
    from outeffhop.lab.data.samples import Prepared, batches

__all__ = ["prepare", "Prepared", "batches", "describe", "load_bags", "Bags", "collate_bags", "Backcopy"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "backcopy": ["Backcopy"],
        "bags": ["Bags", "collate_bags", "load_bags"],
        "describing": ["describe"],
        "preparing": ["prepare"],
        "samples": ["Prepared", "batches"],
    },
)
