"""Data for the four models: what ships with the install, a path, or a dataset of the Hugging Face hub.

prepared = prepare("builtin:text", "mlm", length=128)
for batch in batches(prepared.validation, prepared.eval_collate, 16): ...
"""

from outeffhop.lab.data.bags import Bags, collate_bags, load_bags
from outeffhop.lab.data.describing import describe
from outeffhop.lab.data.prepared import Prepared, batches
from outeffhop.lab.data.preparing import prepare

__all__ = [
    "Prepared",
    "prepare",
    "describe",
    "batches",
    "Bags",
    "load_bags",
    "collate_bags",
]
