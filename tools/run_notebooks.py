"""Runs notebooks and keeps in them what they print and draw, with pictures small enough for git.

python tools/run_notebooks.py examples/memory.ipynb
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

from outeffhop.lab.paper import drawing


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _small(output.data["image/png"])
    nbformat.write(notebook, path)


def _small(picture: str) -> str:
    small = BytesIO()
    drawing.in_palette(Image.open(BytesIO(base64.b64decode(picture)))).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        run(path)


if __name__ == "__main__":
    main()
