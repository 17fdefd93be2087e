"""What real int8 execution gains on CPU, measured side by side in one run.

    python benchmarks/int8.py [--threads 2] [--out FILE]

The paper's BERT (12 layers, 768 wide) with outeffhop, batch 8×128: in OpenVINO int8 and fp32, and in PyTorch
fp32 without compilation, its attention outeffhop's or transformers' own eager softmax. Weights and tokens are
random, which does not affect latency; the error of the outputs is that of this random model and says nothing
about a trained one. "best" is the fastest round, the one that other work on the machine disturbed least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from measure import environment, keep, ratio, times

from outeffhop.models import presets
from outeffhop.quantization import export_int8, measure_int8
from outeffhop.quantization.int8_export import output_of

BATCH, LENGTH = 8, 128
EAGER, INT8 = "torch fp32 eager, outeffhop", "openvino int8, outeffhop"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="paper", choices=presets.SIZES, help="size of BERT (default paper)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each contender (default 2)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds in which all contenders take turns (default 12)")
    parser.add_argument("--calibration", type=int, default=8, help="calibration batches of one sequence (default 8)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "int8-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = presets.build("bert", arguments.size, "outeffhop").eval()
    softmax = presets.build("bert", arguments.size, "vanilla").eval()
    softmax.set_attn_implementation("eager")
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (BATCH, LENGTH))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    calibration = [
        {"input_ids": torch.randint(vocabulary, (1, LENGTH)), "attention_mask": torch.ones(1, LENGTH, dtype=torch.long)}
        for _ in range(arguments.calibration)
    ]
    with tempfile.TemporaryDirectory() as folder:
        exported = export_int8(model, calibration, Path(folder) / "int8", threads=arguments.threads)
        load = os.getloadavg()[0]
        samples = times(
            {
                EAGER: lambda: output_of(model, batch),
                "torch fp32 eager, softmax": lambda: output_of(softmax, batch),
                # seconds, not run: the transfer of the outputs from OpenVINO's process is not part of the comparison
                "openvino fp32, outeffhop": lambda: exported.seconds(batch, "fp32"),
                INT8: lambda: exported.seconds(batch, "int8"),
            },
            "cpu",
            seconds=0.0,  # one call per round
            rounds=arguments.rounds,
        )
        report = measure_int8(model, exported, [batch], rounds=1)
    rows = [
        {
            "contender": name,
            "ms": statistics.median(taken),
            "best_ms": min(taken),
            "times_int8": ratio(samples, name, INT8),
            "best_times_int8": min(taken) / min(samples[INT8]),
        }
        for name, taken in samples.items()
    ]
    print(f"BERT {arguments.size}, batch {BATCH}×{LENGTH}, {arguments.threads} threads, load average {load:.1f}")
    print(f"  {'contender':30} {'ms':>9} {'to int8':>8} {'best ms':>9} {'to int8':>8}")
    for row in rows:
        print(
            f"  {row['contender']:30} {row['ms']:9.1f} {row['times_int8']:8.2f} "
            f"{row['best_ms']:9.1f} {row['best_times_int8']:8.2f}"
        )
    print(f"\n{report}")
    keep(
        arguments.out,
        {
            "question": __doc__.splitlines()[0],
            **environment("cpu"),
            "versions": report.versions,
            "load_average": load,
            "size": arguments.size,
            "batch": BATCH,
            "length": LENGTH,
            "rounds": arguments.rounds,
            "rows": rows,
            "size_bytes": report.size_bytes,
            "sqnr_db": report.sqnr_db,
            "placement": report.placement,
            "operations": {kind: report.counts(kind) for kind in ("int8", "mixed", "float")},
        },
    )
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
