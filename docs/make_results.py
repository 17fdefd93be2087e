"""Writes results.md, and the pictures on it, from the results that are kept.

    python docs/make_results.py

Nothing on that page is written by hand but the words below; a test holds it to the files it is made from.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from outeffhop.experiments.experiment import Result
from outeffhop.experiments.registry import NAMES
from outeffhop.report.markdown import markdown_of

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
INTRODUCTION = """# Results

The paper's tables and figures, measured anew. Each section names its scale, data, seeds and hardware; the paper's own
numbers stand in columns named after it. The best number of a column is bold, the second best underlined. A claim is
*confirmed*, *contradicted*, or *not seen* at the scale stated; what was not measured is not on this page. The same as
one file with all figures: `results/SCALE/report.html`; every number of it: `results/SCALE/NAME/result.json`.
"""
SCALES = {
    "small": """# At small scale

Runs on one GPU, side by side, much as `tools/small_results.sh` starts them; what needs no GPU on CPU cores, as its
section says.

**OutEffHop's and gated OutEffHop's numbers from the GPU are to be measured again.** They were made before a fault of
our kernel was found: where other processes kept the GPU busy, a row of attention could get a wrong share of no-op. It
is mended; alone on a GPU the kernel passed its tests before. How much of these numbers it made is not known: outputs of
one batch of OPT differed by 2 to 15 % of the largest (`results/small/tried.json`), in how many rows we did not see.
Vanilla, clipped and gated softmax, clipped OutEffHop, sparse and GSH layers do not use that kernel.""",
    "tiny": """# At tiny scale

On two CPU cores, with data that comes with the install.""",
}
# what the numbers alone do not say
REMARKS = {
    ("small", "table1"): """
Trained for a few minutes on a shared GPU; steps and batches were chosen by the time at hand, after other settings of
OPT and BERT had been tried for a part of their steps. In OPT the paper's effect is plain, with three seeds. In BERT,
which left the plateau of unigram frequencies only after 1,400 of its 4,000 steps, outliers have not emerged; longer
runs did not fit. ViT's norms grow with training: 17 after 2,400 steps, 53 after 8,000, when it knows its 17,920
pictures by heart (training loss 0.01). They are those of the residual stream in the last layers; gates lower them,
softmax1 did not, neither by our kernel nor, clipped, without it. STanHop-Net has norms of 14 to 29 only in Table 2's
longest windows; there, too, OutEffHop is like dense. With three times the learning rate, 800 steps and no early end
(two CPU cores) it came to 6.2, and 6.4 with OutEffHop. Clipped BERT began without attention and ended on the plateau:
at 128 tokens and γ = −0.025, the paper's, a weight below 3.1/128 becomes 0. In a new model of this size all weights are
near 1/128, so every head gives 0, and queries, keys and values get no gradient (`tests/models/test_presets.py`). OPT's
first rows have few keys to share the weight, which spares it this. What is said here of other settings:
`results/small/tried.json`.
""",
    ("small", "beyond"): """
Four of twelve combinations: the others are trained, but their models were refused when their norms were folded, most
likely by the fault named above, and the machine was gone before they could be measured otherwise.
""",
}


def page() -> tuple[str, dict[Path, Path]]:
    """The text, and which picture is a copy of which."""
    parts, copies = [INTRODUCTION], {}
    for scale, heading in SCALES.items():
        folders = [RESULTS / scale / name for name in NAMES if (RESULTS / scale / name / "result.json").exists()]
        if folders:
            parts.append(heading.replace("# ", "## ", 1) + "\n")
        for folder in folders:
            result = Result.load(folder / "result.json")
            pictures = f"pictures/results/{scale}/{folder.name}"
            section = markdown_of(result, pictures).replace("\n### ", "\n#### ").replace("## ", "### ", 1)
            before, heading, after = section.partition("\n#### ")  # tables and figures come after the verdicts
            parts.append(before + REMARKS.get((scale, folder.name), "") + heading + after)
            copies |= {DOCS / pictures / f"{f.name}.png": folder / f"{f.name}.png" for f in result.figures}
    return "\n".join(parts), copies


def main() -> None:
    text, copies = page()
    (DOCS / "results.md").write_text(text, encoding="utf-8")
    shutil.rmtree(DOCS / "pictures" / "results", ignore_errors=True)
    for copy, original in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)


if __name__ == "__main__":
    main()
