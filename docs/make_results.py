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
    "small": "# At small scale",
    "tiny": "# At tiny scale\n\nOn two CPU cores, with data that comes with the install.",
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
            parts.append(markdown_of(result, pictures).replace("\n### ", "\n#### ").replace("## ", "### ", 1))
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
