"""A little of everything that gives numbers, into one folder; to be done twice and compared.

python -c "import everything; everything.main()" FOLDER
"""

import json
import sys
from pathlib import Path

import torch

from outeffhop.cli.main import main as command
from outeffhop.lab.training import DataConfig, RunConfig, TrainConfig, train
from outeffhop.memory import HopfieldMemory

DATA = {"bert": "builtin:text", "opt": "builtin:text", "vit": "builtin:images", "stanhop": "builtin:series"}
SIZES = {
    "bert": dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2),
    "opt": dict(num_hidden_layers=1, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_attention_heads=2),
    "vit": dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2),
    "stanhop": dict(e_layers=1, d_model=16, d_ff=32, num_heads=2),
}
OFTEN = dict(max_steps=3, batch_size=4, eval_batches=1, log_steps=1, save_steps=3, outlier_batches=1, device="cpu")


def train_one(model, out, cache, seed=0):
    """With dropout where the model has it, with random masks, and with augmented pictures."""
    samples = {"augment": "light"} if model == "vit" else {}
    if model in ("bert", "opt"):
        samples = {"length": 32, "vocab_size": 300, "cache_dir": str(cache)}
    config = RunConfig(
        model,
        method="gated-outeffhop",
        data=DATA[model],
        out=str(out),
        changes=SIZES[model],
        train=TrainConfig(seed=seed, **OFTEN),
        samples=DataConfig(**samples),
    )
    train(config, quiet=True)


def retrieve():
    random = torch.Generator().manual_seed(0)
    patterns = torch.randn(64, 16, generator=random)
    memory = HopfieldMemory(patterns, beta=2.0, method="outeffhop")
    found = memory.retrieve(patterns[:8] + 0.1, steps=None, trace=True)
    return [found.state.tolist(), found.steps.tolist(), found.energy.tolist()]


def everything(out):
    torch.set_num_threads(1)
    for model in DATA:
        train_one(model, out / model, out.parent / f"{out.name}-cache")
    run, cut = str(out / "opt"), ["--batch-size", "4", "--device", "cpu", "--out", str(out / "measured")]
    assert command(["quantize", run, *cut, "--seeds", "2", "--batches", "1", "--calibration-batches", "1"]) == 0
    assert command(["outliers", run, *cut, "--batches", "1"]) == 0
    assert command(["reproduce", "energy", "--quick", "--device", "cpu", "--out", str(out / "results")]) == 0
    (out / "retrieved.json").write_text(json.dumps(retrieve()))


def main():
    everything(Path(sys.argv[1]))
