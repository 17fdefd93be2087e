"""What needs more than the library: data, training, the paper's experiments and their reports (``outeffhop[lab]``)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["data", "training", "paper", "report", "diagnosis", "mending"]
)
