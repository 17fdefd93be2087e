"""Which models are served, and how far: runs every cell of the matrix and writes docs/compatibility.md and its JSON.

make matrix                       # continues where it stopped
python tools/matrix.py --again    # from the beginning
python tools/matrix.py --models LlamaForCausalLM --cells export ONNX --again

Several processes may fill the cells of different models at once.
"""

from __future__ import annotations

import argparse
import fcntl
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
from matrix_cells import CELLS, SIX  # noqa: E402
from matrix_truth import NotHere, NotServed, subject  # noqa: E402

JSON, PAGE = ROOT / "docs/compatibility.json", ROOT / "docs/compatibility.md"
SIGN = {"held": "✓", "not served": "—", "failed": "✗"}


def cell(name, what):
    """One cell: its state and a few words."""
    try:
        model, batch = subject(name)
        return {"state": "held", "text": CELLS[what](model, batch, name)}
    except NotHere:
        raise
    except NotServed as reason:
        return {"state": "not served", "text": _line(reason)}
    except Exception as error:  # a fault of any kind is a cell, too
        return {"state": "failed", "text": f"{type(error).__name__}: {_line(error)}"}


def _line(error):
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())  # some errors are coloured for a terminal
    return text if len(text) <= 400 else text[:397] + "..."


def fill(found, models, cells, again, tell, file=None):
    """Fills the cells that are missing, or all; writes the file after each model."""
    for i, name in enumerate(models):
        row = found.setdefault(name, {})
        for what in cells:
            if again or what not in row:
                try:
                    row[what] = cell(name, what)
                except NotHere as reason:  # what another machine found stays
                    row.setdefault(what, {"state": "not served", "text": _line(reason)})
        found[name] = row = {what: row[what] for what in CELLS if what in row}
        states = [c["state"] for c in row.values()]
        tell(f"{i + 1} of {len(models)} {name}: " + ", ".join(f"{states.count(s)} {s}" for s in SIGN))
        if file is not None:
            _keep(file, {name: row})
    return found


def _keep(file, rows):
    """Puts rows into the file, between those that other processes put there."""
    with file.open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        kept = json.loads(handle.read() or "{}") | rows
        names = sorted(kept, key=lambda name: MATRIX.index(name) if name in MATRIX else len(MATRIX))
        handle.truncate(0)
        handle.write(json.dumps({name: kept[name] for name in names}, indent=1, ensure_ascii=False) + "\n")


def page(found):
    """The matrix in Markdown: tables, whose footnotes say why, and what each column compares."""
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    reasons: list[str] = []
    tables = []
    for title, cells in _tables().items():
        rows = [
            f"| {_short(name)} | " + " | ".join(_shown(name, what, row.get(what), reasons) for what in cells) + " |"
            for name, row in found.items()
        ]
        tables += [
            f"## {title}",
            "",
            "| model | " + " | ".join(cells) + " |",
            "|---" * (len(cells) + 1) + "|",
            *rows,
            "",
        ]
    lines = [
        "# Compatibility",
        "",
        "Look up your model to see what works with it: ✓ agreed with an independent truth, "
        "— is not served or does not arise, ✗ failed; [the numbers](#reasons) say why. Each row is a tiny model that "
        f"looks trained (scores far off 0, outliers, unequal norms), on CPU with {versions}. `make matrix` fills the "
        "tables; `compatibility.json` has the distances from the truths and the classes of the models.",
        "",
        *tables,
        "## Reasons",
        "",
        *(f"{i}. {text}" for i, text in enumerate(reasons, 1)),
        "",
        "## What is compared",
        "",
        "The truth of a method is attention in float64, that of a scheme rounding in float64, and that of mending the "
        "sinks, the schedule and the penalty; all are written from the formulas, without the library's code.",
        "",
    ]
    columns: dict[str, list[str]] = {}
    for what, check in CELLS.items():
        columns.setdefault(MEANING.get(what) or " ".join(check.__doc__.split()).rstrip("."), []).append(what)
    lines += [f"- **{', '.join(names)}**: {text}." for text, names in columns.items()]
    return "\n".join(lines) + "\n"


def _tables():
    """Two tables, each of which fits on a screen."""
    names = list(CELLS)
    cut = names.index(SIX[-1]) + 1
    return {"Measure, quantize, convert": names[:cut], "Run, save, train": names[cut:]}


def _short(name):
    """The architecture, without what every class of its kind is called."""
    return re.sub(r"(LMHeadModel|For[A-Z]\w+|Model)$", "", name)


def _shown(name, what, each, reasons):
    """A sign, with the number of its reason."""
    if each is None or each["state"] == "held":
        return "?" if each is None else SIGN["held"]
    text = _plain(_general(each["text"], name))
    if text not in reasons:
        reasons.append(text)
    return f"{SIGN[each['state']]}<sup>{reasons.index(text) + 1}</sup>"


def _general(text, name):
    """The same words for all models and methods that have one reason, and no more than one line."""
    text = text.replace(f"of this {name} ", "").replace(f"this {name}", "the model").replace(f"a {name}", "it")
    text = re.sub(r" \(ALL_ATTENTION_FUNCTIONS\)|; it says: .*", "", text.replace(name, "it"))
    for method in SIX:
        text = text.removeprefix(f"{method} ")
    return text if {".", "_"} & set(text.split()[0]) else text[0].upper() + text[1:]


def _plain(text):
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("\x1b", "")


MEANING = {
    **dict.fromkeys(SIX, "The output of the converted model, against the truth"),
    **dict.fromkeys(("dynamic cache", "static cache"), "Logits as tokens are generated, against the truth without one"),
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
    found = json.loads(JSON.read_text())
    PAGE.write_text(page({name: found[name] for name in MATRIX if name in found}))


if __name__ == "__main__":
    main()
