"""Data for the four models: what ships with the install, a path, or a dataset of the Hugging Face hub.

prepared = prepare("builtin:text", "mlm", length=128)
for batch in batches(prepared.validation, prepared.eval_collate, 16): ...
"""

from outeffhop.data.bags import Bags, collate_bags, load_bags
from outeffhop.data.describing import describe
from outeffhop.data.loading import prepare
from outeffhop.data.prepared import TASKS, Prepared, batches, task_of

__all__ = [
    "Prepared",
    "prepare",
    "describe",
    "task_of",
    "batches",
    "TASKS",
    "Bags",
    "load_bags",
    "collate_bags",
]
