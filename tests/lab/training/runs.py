"""Runs small enough to be trained over and over, and what is compared of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig

MODELS = ("bert", "opt", "vit", "stanhop")
METHODS = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")
DATA = {"bert": "builtin:text", "opt": "builtin:text", "vit": "builtin:images", "stanhop": "builtin:series"}
SIZES = {
    "bert": dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2),
    "opt": dict(num_hidden_layers=2, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_attention_heads=2),
    "vit": dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2),
    "stanhop": dict(e_layers=1, d_model=16, d_ff=32, num_heads=2),
}
NO_DROPOUT = {
    "bert": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "opt": dict(dropout=0.0),
    "vit": {},
    "stanhop": dict(dropout=0.0),
}
OFTEN = dict(
    max_steps=12,
    batch_size=8,
    warmup_steps=2,
    eval_steps=6,
    eval_batches=2,
    log_steps=3,
    save_steps=4,
    outlier_steps=6,
    outlier_batches=2,
    device="cpu",
)


def config(model, out, cache, *, method="outeffhop", init=None, changes=None, samples=None, **train):
    """A tiny run; what is given by name goes to ``train``."""
    cut = {"length": 32, "vocab_size": 300, "cache_dir": str(cache)} if model in ("bert", "opt") else {}
    return RunConfig(
        model=model,
        method=method,
        data=DATA[model],
        out=str(out),
        init=None if init is None else str(init),
        changes={} if init else SIZES[model] | (changes or {}),
        train=TrainConfig(**(OFTEN | train)),
        samples=DataConfig(**(cut | (samples or {}))),
    )


def weights(out):
    return load_file(Path(out) / "model" / "model.safetensors")


def weight_bytes(out):
    return (Path(out) / "model" / "model.safetensors").read_bytes()


def metrics(out):
    """The lines of metrics.jsonl, without how fast they were reached."""
    lines = RunFolder(out).metrics()
    return [{k: v for k, v in line.items() if not k.endswith("_per_second")} for line in lines]


def result(out):
    return json.loads((Path(out) / "result.json").read_text())


def furthest(first, second):
    """Of two models' weights."""
    assert first.keys() == second.keys()
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


def environment():
    """One thread a process: there are several at once."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }


def start(script, *arguments):
    """Python code in a process of its own, which finds this module."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, code=0):
    """Waits, and shows what the process said where its exit code is another."""
    said, _ = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said
