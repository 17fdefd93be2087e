"""Which models are served, and how far: runs every cell of the matrix and writes docs/compatibility.md and its JSON.

make matrix                       # continues where it stopped
python tools/matrix.py --again    # from the beginning
python tools/matrix.py --models LlamaForCausalLM --cells export ONNX --again
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/models"), str(ROOT / "tools")]

import torch  # noqa: E402
import transformers  # noqa: E402
from architectures import MATRIX  # noqa: E402
from matrix_cells import CELLS  # noqa: E402
from matrix_truth import NotServed, subject  # noqa: E402

JSON, PAGE = ROOT / "docs/compatibility.json", ROOT / "docs/compatibility.md"
SIGN = {"held": "✓", "not served": "·", "failed": "✗"}


def cell(name, what):
    """One cell: its state and a few words."""
    try:
        model, batch = subject(name)
        return {"state": "held", "text": CELLS[what](model, batch, name)}
    except NotServed as reason:
        return {"state": "not served", "text": _line(reason)}
    except Exception as error:  # a fault of any kind is a cell, too
        return {"state": "failed", "text": f"{type(error).__name__}: {_line(error)}"}


def _line(error):
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())  # some errors are coloured for a terminal
    return text if len(text) <= 200 else text[:197] + "..."


def fill(found, models, cells, again, tell, file=None):
    """Fills the cells that are missing, or all; writes the file after each model."""
    for i, name in enumerate(models):
        row = found.setdefault(name, {})
        for what in cells:
            if again or what not in row:
                row[what] = cell(name, what)
        states = [c["state"] for c in row.values()]
        tell(f"{i + 1} of {len(models)} {name}: " + ", ".join(f"{states.count(s)} {s}" for s in SIGN))
        if file is not None:
            file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return found


def page(found):
    """The matrix in Markdown: signs, then what each column compares, then every reason."""
    cells = list(CELLS)
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    lines = [
        "# Compatibility",
        "",
        "Look up your model to see what works with it. `make matrix` fills this page: each cell runs a tiny model of "
        f"two layers that looks trained (scores far off 0, outliers, unequal norms), on CPU with {versions}.",
        "",
        "- ✓ the result agreed with an independent truth, named [below](#what-is-compared);",
        "- · not served, or the question does not arise; [why](#reasons);",
        "- ✗ a fault, or a limit of another library; [what happened](#reasons).",
        "",
        "| model | " + " | ".join(cells) + " |",
        "|---" * (len(cells) + 1) + "|",
    ]
    for name, row in found.items():
        lines.append(f"| {name} | " + " | ".join(SIGN[row[c]["state"]] if c in row else "?" for c in cells) + " |")
    lines += ["", "## What is compared", ""]
    lines.append(
        "The truth of a method is attention in float64, written from the formulas without the library's code. "
        "Numbers in the JSON are ‖found − truth‖ / ‖truth‖."
    )
    lines.append("")
    for what, check in CELLS.items():
        lines.append(f"- **{what}**: {check.__doc__.rstrip('.') if check.__doc__ else MEANING[what]}.")
    lines += ["", "## Reasons", ""]
    for name, row in found.items():
        reasons: dict[str, list[str]] = {}
        for what, each in row.items():
            if each["state"] != "held":
                reasons.setdefault(each["text"], []).append(what)
        lines += [f"- {name}, {', '.join(where)}: {_plain(text)}" for text, where in reasons.items()]
    return "\n".join(lines) + "\n"


def _plain(text):
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("\x1b", "")


MEANING = {
    **{m: "the output of the converted model, against the truth" for m in CELLS if "outeffhop" in m},
    **dict.fromkeys(("vanilla", "clipped", "gated"), "the output of the converted model, against the truth"),
    **dict.fromkeys(("dynamic cache", "static cache"), "generated tokens, against those without a cache"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MATRIX), choices=list(MATRIX))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--again", action="store_true", help="fill cells that are there already")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = json.loads(JSON.read_text()) if JSON.exists() else {}
    fill(found, given.models, given.cells, given.again, lambda text: print(text, flush=True), JSON)
    PAGE.write_text(page({name: found[name] for name in MATRIX if name in found}))


if __name__ == "__main__":
    main()
