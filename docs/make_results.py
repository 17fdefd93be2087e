"""Writes results.md, and the pictures on it, from the results that are kept.

    python docs/make_results.py

Nothing on that page is written by hand but the words below; a test holds it to the files it is made from.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.paper.running import redraw
from outeffhop.lab.report.markdown import markdown_of

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
PICTURES = DOCS / "pictures" / "results"
INTRODUCTION = """# Results

The paper's tables and figures, measured anew. Each section names its scale, data, seeds and hardware; the paper's own
numbers stand in columns named after it. The best number of a column is bold, the second best underlined. A claim is
*confirmed*, *contradicted*, or *not seen* at the scale stated: not seen where the difference is within chance (two
standard errors, where there are several seeds), or smaller than claimed. What was not measured is empty. The same as
one file with all figures: `results/SCALE/report.html`; every number of it: `results/SCALE/NAME/result.json`. To
measure it yourself: [Reproduce the paper](howto/reproduce.md).
"""
SCALES = {
    "small": """# At small scale

Runs on one GPU, side by side, as `tools/small_results.sh` starts them; what needs no GPU on CPU cores, as its section
says. A first set of OutEffHop's numbers was made with a kernel that could err on a busy GPU
([a busy GPU](reliability.md#a-busy-gpu)). All that used it were measured again, and differ from the first by no more
than seeds do (`results/small/tried.json`); STanHop-Net's, trained in fp32, by at most 1e-8.""",
    "small-all-prose": """# BERT and OPT once more, on all of the text

How many of the books the runs above learnt from was not written down; fewer, by their perplexity. These are the same
settings on all 317 books that are for training (209 MB), three seeds each of vanilla and OutEffHop, kept in
`results/small-all-prose`:

<!-- not run: it needs a GPU -->
```sh
outeffhop reproduce table1 --scale small --seeds 3 --data DATA --device cuda \\
    --only 'bert-vanilla-*' 'bert-outeffhop-*' 'opt-vanilla-*' 'opt-outeffhop-*'
```""",
    "tiny": """# At tiny scale

On two CPU cores, with data that comes with the install.""",
}
# what the numbers alone do not say
REMARKS = {
    ("small", "table1"): """
Trained side by side on one GPU; at the speeds in `results/small/tried.json` BERT's six runs take 16 to 20 minutes.
Steps and batches were chosen by the time at hand, after shorter runs without outliers. W8A8 is calibrated on 16 batches
with running ranges, OPT's on 4 batches with the 99.999th percentile, as in the paper.

**BERT** and **OPT** show the paper's effect. BERT's norms grow once it has left the plateau of unigram frequencies,
at about 2,000 steps: after 4,000 steps in all, the learning rate gone by then, they were 9.5 and 10.0; now they are
132 and 62. That is one run of each; with three seeds and more text the gap is smaller
([below](#bert-and-opt-once-more-on-all-of-the-text)). Gates leave 9 to 11, at 4 to 8 % more perplexity than vanilla's.
Clipped BERT begins without attention: at 128 tokens and γ = −0.025, the paper's, a weight below 3.1/128 becomes 0. In
a new model of this size all weights are near 1/128, so every head gives 0, and queries, keys and values get no
gradient (`tests/models/test_presets.py`). Runs of 4,000 steps in all did not leave the plateau (perplexity 415, and 408
with OutEffHop); those here do, and end 8 and 11 perplexity behind vanilla. OPT's first rows have few keys to share the
weight, which spares it this.

**ViT**'s norms grow with training: vanilla's are 17 after 2,400 steps in all, and 53 to 92 after 8,000, which are 57
times its 18,000 pictures; its accuracy on others has fallen by then, from 59 to 56 %. They are those of the residual
stream. The first layer's MLP makes most of it (47 of 53 with the first seed), and of the eight layers it is the third
and the fourth after which it is largest. Gated OutEffHop has the lowest. Softmax1 alone changes nothing that seeds do
not: +1 % here, and −5 % with the runs of seeds 1 and 2 that were trained a day before. W8A8 costs neither anything
that 10,000 pictures could show.

**STanHop-Net** has norms of 4 to 5, and of 14 to 29 only with Table 2's two longest horizons, with dense layers and as
much with OutEffHop's. With three times the learning rate, 800 steps and no early end (two CPU cores) it came to 6.2,
and 6.4 with OutEffHop. Trained again on another day it gave the same to the last digit or to 1e-8, and on two CPU
cores the same to 2e-7. (Its W8A8 is the exception: one number rounded the other way moves the MSE by up to 0.0001.)

It is these two that keep the average at −22 %, short of the paper's −26 %: BERT and OPT alone give −44 %.

Not measured in one go: of OPT the rows of vanilla, clipped, clipped OutEffHop and gated, of ViT vanilla's first seed
and gated are from earlier runs on such a machine, whose last measurements had TF32 in matrix products (0.0005 to 0.004
of an output's largest number). Two runs of one seed differ on a GPU: vanilla OPT's first seed had a norm of 15.9 here
and of 20.5 in "Beyond the paper", clipped ViT's 58 on one day and 54 on the next. What is said here of other settings
and other days: `results/small/tried.json`.
""",
    ("small-all-prose", "table1"): """
With more text (OPT's perplexity is 51 to 52, not 56 to 57) the outliers are larger, and seeds differ more. OPT's gain
holds: each of OutEffHop's three norms is below all three of vanilla's, and W8A8 costs it 1.8 to 3.8 of perplexity
against 3.9 to 15.5. BERT's norms are 94, 166 and 192 with vanilla and 136, 71 and 112 with OutEffHop: less on average,
and with less spread, but with the first seed it is OutEffHop that has the larger ones and loses more in W8A8 (0.57
against 0.34). BERT's W8A8 is therefore "not seen": the difference is within two standard errors. OutEffHop's
perplexity is 0.2 to 1.4 above vanilla's of the same seed, most where the plateau lasted to step 3,500
(`results/small/tried.json`).

In place of the runs above, with ViT and STanHop-Net as they are, the averages over four models would be −28 % of
kurtosis and −19 % of the norm.
""",
    ("small", "convergence"): """
The paper shows CIFAR-100 as well, and all 50,000 pictures of CIFAR-10; we had 20,000 of these.
""",
    ("small", "beyond"): """
One trained model of each, and a single run of vanilla says little: its W8A8 loss is 4.0 here, and 6.3, 8.9 and 10.2
with Table 1's three seeds. OutEffHop's is 2.4 here, and 2.4, 2.8 and 2.8 there (the first is the same model).

QK-norm does most against the loss: in W8A8 a tenth to two fifths of it is left. But it costs 1.6 to 4.8 % of
perplexity, so that every model with QK-norm is outside of the 2 % that count as equal (the nearest by 0.01 %). If only
the rounded model matters, gates per channel are best for W8A8, and those with QK-norm and learned sinks for W4A8.
Gates per head that see all features were worse than the paper's, which see a head's. Folding made no difference.
""",
}


def page() -> tuple[str, list[Path]]:
    """The text, and the results on it."""
    parts, shown = [INTRODUCTION], []
    for scale, heading in SCALES.items():
        paths = [path for name in NAMES if (path := RESULTS / scale / f"{name}.json").exists()]
        if paths:
            parts.append(heading.replace("# ", "## ", 1) + "\n")
        for path in paths:
            result = ResultFile.load(path).result
            assert result is not None, f"{path} has no result yet"
            pictures = f"{PICTURES.name}/{scale}/{path.stem}"
            section = markdown_of(result, f"pictures/{pictures}").replace("\n### ", "\n#### ").replace("## ", "### ", 1)
            before, heading, after = section.partition("\n#### ")  # tables and figures come after the verdicts
            parts.append(before + REMARKS.get((scale, path.stem), "") + heading + after)
            shown.append(path)
    return "\n".join(parts), shown


def draw(path: Path, folder: Path) -> list[Path]:
    """Draws the figures of a result below a folder; returns their paths, as seen from there."""
    target = folder / path.parent.name / path.stem
    redraw(find(path.stem), path, target)
    return [picture.relative_to(folder) for picture in sorted(target.iterdir())]


def main() -> None:
    text, shown = page()
    (DOCS / "results.md").write_text(text, encoding="utf-8")
    shutil.rmtree(PICTURES, ignore_errors=True)
    for path in shown:
        draw(path, PICTURES)


if __name__ == "__main__":
    main()
