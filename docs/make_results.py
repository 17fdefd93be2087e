"""Writes results.md and the figures on it from the kept results.

    python docs/make_results.py
    python docs/make_results.py --conclude    # first draws the verdicts and tables again from the kept cells

Only the words below are written by hand. tests/docs/test_results_page.py checks that the page matches the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
from pathlib import Path

from outeffhop.lab.paper import Settings, mil, run
from outeffhop.lab.paper.experiment import Result
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.paper.running import redraw
from outeffhop.lab.report.experiments_page import claim_groups
from outeffhop.lab.report.markdown import claims_of, markdown_of

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
PICTURES = DOCS / "pictures" / "results"
INTRODUCTION = """# Results

See what the method gains, claim by claim, in models of 0.7 to 23 million parameters:

- **OPT** gains: softmax1 nearly halves its outliers, and W8A8 costs it less, at equal perplexity.
- **BERT** changes in the same direction, but within the spread of three seeds.
- **ViT** and **STanHop-Net** do not change with softmax1 alone.
- A training step takes as long as with softmax, within 4 %.
- As a memory, OutEffHop retrieves as well as the dense model, not better.
- The theory's convergence and capacity results hold; five printed formulas need a correction.

[Mend a checkpoint](howto/mend.md) has results for trained models. [Reproduce the paper](howto/reproduce.md) measures
these.
"""
CLAIMS = """## All claims

Every claim that at least two seeds can judge. In *a against b*, a is with the method; ± is the standard deviation over
seeds. *Not seen*: within two standard errors, or smaller than claimed. *Not as printed*: a formula needs the correction
that [Theory](theory.md) gives. Seeds *none*: nothing is random, or time was measured.
"""
DETAILS = """## Experiment by experiment

Models were trained at scale *small*, side by side on one GPU. In tables the best number of a column is bold and the
second best underlined; numbers within their ± of each other are a tie. `results/SCALE/NAME.json` has every setting and
number, with the paper's beside it.
"""
# scale → what its headings add to the place in the paper
SCALES = {"small-all-prose": " on all of the text", "small": "", "tiny": " at tiny scale"}
# what the numbers alone do not say
REMARKS = {
    ("small-all-prose", "table1"): """
BERT and OPT with all 317 training books (209 MB). Each of OutEffHop's OPT norms is below all of vanilla's, and W8A8
costs it 1.8 to 3.8 of perplexity instead of 3.9 to 15.5. BERT's norms overlap (dots), and OutEffHop's perplexity is 0.2
to 1.4 higher with the same seed. Other runs did not record how many books they saw; judging by their perplexity, fewer.
""",
    ("small-all-prose", "beyond"): """
OPT with the outlier penalty from the first step (`log_tail`, weight 0.1), one run of each, on 101,435 of the 106,565
samples. The penalty leaves no outliers and a W8A8 loss of 0.8 without gates, 3.1 with them, where vanilla's is 10.5.
But it costs 20 to 24 % of perplexity, more than W8A8 costs vanilla: 63.4 against 61.5. Rounded to W4A8, all three have
a higher perplexity than vanilla. Fine-tuning a trained OPT with it
[costs 2 %](howto/mend.md#does-it-pay).
""",
    ("small", "table1"): """
One run of each method, except where ± is given. With gates BERT's norms are 9 to 11, at 4 to 8 % more perplexity.
Clipped BERT starts without attention: with 128 tokens and the paper's γ = −0.025, weights below 3.1/128 become 0 and
pass no gradient. In ViT gated OutEffHop has the lowest norm, 40, and the highest accuracy, 57.8 %. STanHop-Net has no
outliers to remove; it is measured on the validation split, in the paper on the test split. Over twelve pairs the
paper's table averages −21.9 % of kurtosis and −26.1 % of the norm, ours −17.2 % and −12.5 %.

Two runs of one seed differ on a GPU: vanilla OPT's first seed had a norm of 15.9 here and of 20.5 in [Beyond the
paper](#beyond-the-paper). Some runs of OPT and ViT were measured with TF32 matrix products, which err by at most 0.4 %
of an output's largest number.
""",
    ("small", "table2"): """
One run of each on ETTh1, ended by an earlier stopping rule that keeps the last weights. OutEffHop has the lowest MSE of
the four at 24 and 720 rows, the second lowest at 168 and 336, and never the lowest norm.
""",
    ("small", "training-outliers"): """
In vanilla BERT the norms fall with depth, where the paper's grow. Layers are counted from 0, of 6 in BERT and OPT, 8 in
ViT and 4 in STanHop-Net. BERT's first FFN layer and first residual LayerNorm were not recorded.
""",
    ("small", "memory-capacity"): """
Our polynomial model normalizes its weights, and errs less than all others. The authors' does not, and its answers leave
the range of pixels.
""",
    ("small", "convergence"): """
One run of each, on 20,000 of CIFAR-10's 50,000 images. Averaged over training, the loss is 1.361 with OutEffHop, 1.362
with dense layers and 1.273 with sparse ones; the last accuracy is 57.7, 57.2 and 57.0 %.
""",
    ("small", "noise-robustness"): """
Images, models and Λ are those of Figure 5.
""",
    ("small", "mil"): """
The polynomial model was not measured.
""",
    ("small", "cost"): """
The methods took turns. A step needs the same GPU memory with both, within 0.02 %.
""",
    ("small", "beyond"): """
One trained model of each, and a single run says little: vanilla's W8A8 loss is 4.0 here, and 6.3, 8.9 and 10.2 with
Table 1's three seeds. QK-norm lowers the loss most, at 1.6 to 4.8 % more perplexity. Within 2 % of the best perplexity,
gates per channel are best. Gates per head that see all features were worse than the paper's.
""",
}
# what a reader must know of how the numbers came about; the result files have all conditions
CONDITIONS = ("device",)
MORE_CONDITIONS = {
    ("small-all-prose", "table1"): ("seeds",),
    ("small-all-prose", "training-outliers"): ("seeds",),
    ("small", "table1"): ("W8A8",),
    ("small", "memory-capacity"): ("seeds", "queries", "retrieval", "outliers"),
    ("small", "noise-robustness"): ("seeds", "queries"),
    ("small", "mil"): ("seeds", "folds"),
    ("small", "cost"): ("rounds",),
    ("small", "theory"): ("seeds", "patterns"),
}
_COLUMNS = ("avg kurtosis", "max inf norm", "FP perplexity", "W8A8 perplexity", "parameters")
PAPERS = tuple(f"paper: {column}" for column in _COLUMNS)  # diamonds in the figure
# tables and columns that the page leaves to the result files, since the claims or the figure say the same
LEFT_OUT = {
    ("small-all-prose", "table1"): ("With softmax1 against without", "BERT", "OPT"),
    ("small-all-prose", "training-outliers"): ("Maximum infinity norm",),
    ("small", "table1"): ("OPT with options beyond the paper", "ViT", "STanHop-Net", "parameters", *PAPERS),
    ("small", "table2"): ("OutEffHop's rank among the four",),
    ("small", "convergence"): ("Speed of learning",),
    ("small", "cost"): ("A training step",),
    ("small", "theory"): ("Random memories of as many patterns as the valid capacity bound allows",),
    **dict.fromkeys(
        (("small", "beyond"), ("small-all-prose", "beyond")),
        (
            "Lowest loss at equal perplexity",
            "Lowest perplexity once rounded",
            "OPT",
            "With folded LayerNorms",
        ),
    ),
}


def page() -> tuple[str, list[Path]]:
    """The text, and the results on it."""
    shown, results = {}, {}
    for scale, suffix in SCALES.items():
        for path in (path for name in NAMES if (path := RESULTS / scale / f"{name}.json").exists()):
            result = ResultFile.load(path).result
            assert result is not None, f"{path} has no result yet"
            shown[result.of + suffix] = path
            results[result.of + suffix] = result
    parts, known = [], set()
    for group in claim_groups(results).values():
        for title, result in group.items():
            path = shown[title]
            folder = f"pictures/{PICTURES.name}/{path.parent.name}/{path.stem}"
            key = (path.parent.name, path.stem)
            said = without_captions(result) if result.name in known else result
            known.add(result.name)
            conditions = (*CONDITIONS, *MORE_CONDITIONS.get(key, ()))
            left_out = LEFT_OUT.get(key, ())
            section = markdown_of(said, folder, REMARKS.get(key, ""), title, left_out, conditions)
            parts.append(section.replace("\n### ", "\n#### ").replace("## ", "### ", 1))
    return "\n".join([INTRODUCTION, f"{CLAIMS}\n{claims_of(results)}", DETAILS, *parts]), list(shown.values())


def without_captions(result: Result) -> Result:
    """A result whose experiment is on the page already, at another scale: what it is about is said there."""
    figures = [dataclasses.replace(figure, caption="") for figure in result.figures]
    return dataclasses.replace(result, about="", figures=figures)


def draw(path: Path, folder: Path) -> list[Path]:
    """Draws the figures of a result below a folder; returns their paths, as seen from there."""
    target = folder / path.parent.name / path.stem
    redraw(find(path.stem), path, target)
    return [picture.relative_to(folder) for picture in sorted(target.iterdir())]


def conclude(path: Path) -> None:
    """Replaces a kept result by what the experiment concludes from its cells; nothing is measured."""
    kept = ResultFile.load(path)
    with tempfile.TemporaryDirectory() as temporary:
        out, data = Path(temporary, "results"), Path(temporary, "data")
        shutil.copytree(path.parent, out)  # an experiment may look at another's cells
        for name in ("mnist", "cifar10", "mil"):  # which there are decides which cells there are
            (data / name).mkdir(parents=True)
        for bags in mil.FILES:
            (data / "mil" / f"{bags}.npz").touch()
        on_cpu = kept.result is None or "CPU" in kept.result.conditions["device"]
        device = "cpu" if on_cpu else "cuda"
        settings = Settings(kept.scale, kept.seeds, out, data, device=device, only=tuple(kept.cells))
        run(find(path.stem), settings, tell=lambda _: None)
        shutil.copy(out / path.name, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conclude", action="store_true", help="draw the verdicts again from the kept cells")
    if parser.parse_args().conclude:
        for path in (p for name in NAMES for p in sorted(RESULTS.glob(f"*/{name}.json"))):
            conclude(path)
    text, shown = page()
    (DOCS / "results.md").write_text(text, encoding="utf-8")
    shutil.rmtree(PICTURES, ignore_errors=True)
    for path in shown:
        draw(path, PICTURES)


if __name__ == "__main__":
    main()
