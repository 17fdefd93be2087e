"""Diagnosis: a checkpoint's outliers, what 8 bits cost it by every scheme, who is to blame, and what can be done.

report = outeffhop.diagnose("checkpoint", out="diagnosis")      # the page is diagnosis/diagnosis.html
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.lab.diagnosis.diagnosing import diagnose
    from outeffhop.lab.diagnosis.diagnosis_config import DiagnosisConfig
    from outeffhop.lab.diagnosis.diagnosis_page import diagnosis_page
    from outeffhop.lab.diagnosis.diagnosis_report import DiagnosisReport
    from outeffhop.lab.diagnosis.verdicts import VERDICTS, verdict

__all__ = ["diagnose", "diagnosis_page", "DiagnosisConfig", "DiagnosisReport", "VERDICTS", "verdict"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "diagnosing": ["diagnose"],
        "diagnosis_config": ["DiagnosisConfig"],
        "diagnosis_page": ["diagnosis_page"],
        "diagnosis_report": ["DiagnosisReport"],
        "verdicts": ["VERDICTS", "verdict"],
    },
)
