"""Mending: a trained checkpoint loses its outliers, and keeps what it can do.

report = outeffhop.mend("checkpoint", "text/", "mended")      # the model is in mended/model
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.lab.mending.mend_config import MendConfig
    from outeffhop.lab.mending.mend_report import Measured, MendReport
    from outeffhop.lab.mending.stages import mend, resume_mending

__all__ = ["mend", "resume_mending", "MendConfig", "MendReport", "Measured"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "stages": ["mend", "resume_mending"],
        "mend_config": ["MendConfig"],
        "mend_report": ["Measured", "MendReport"],
    },
)
