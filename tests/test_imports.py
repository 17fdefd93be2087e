"""The layers of the package: imports go one way, and importing it starts nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import outeffhop

ROOT = Path(outeffhop.__file__).parent
# Left to right as data flows; a module may import from its own layer and from those before it.
LAYERS = [
    ["_naming"],
    ["_io"],
    ["functional"],
    ["methods"],
    ["ops"],
    ["state"],
    ["memory", "nn"],
    ["models"],
    ["metrics"],
    ["outliers"],
    ["quantization"],
    ["lab/data"],
    ["lab/training"],
    ["lab/paper"],
    ["lab/report"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imports_of(path):
    """The outeffhop modules a file imports, wherever in the file."""
    package = ["outeffhop", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "outeffhop")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "outeffhop":
                yield from (f"outeffhop.{alias.name}" for alias in node.names)
            elif module.split(".")[0] == "outeffhop":
                yield module


def layer_of(parts):
    """The layer of a file or module by its parts below ``outeffhop``: the lab's rooms are layers of their own."""
    return "/".join(parts[:2]) if parts[:1] == ["lab"] else (parts[0] if parts else None)


def layer_of_file(path):
    return layer_of(list(path.relative_to(ROOT).with_suffix("").parts))


def wrong_way(path):
    layer = layer_of_file(path)
    for module in imports_of(path):
        target = layer_of(module.split(".")[1:])
        if target in RANK and RANK[target] > RANK[layer]:
            yield f"{path.relative_to(ROOT)} imports {module}"
        if target in RANK and RANK[target] == RANK[layer] and target != layer:
            yield f"{path.relative_to(ROOT)} imports {module}, which stands beside it"


def test_imports_go_one_way():
    files = [p for p in ROOT.rglob("*.py") if p not in (ROOT / "__init__.py", ROOT / "lab" / "__init__.py")]
    assert files
    unknown = {layer_of_file(p) for p in files} - RANK.keys()
    assert not unknown, f"give these a place in LAYERS: {unknown}"
    assert not [line for path in files for line in wrong_way(path)]


def test_the_check_can_fail(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    bad = tmp_path / "ops" / "x.py"
    bad.write_text("def f():\n    from outeffhop.nn import hopfield\n    from .. import cli\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(wrong_way(bad)) == [
        "ops/x.py imports outeffhop.nn",
        "ops/x.py imports outeffhop.cli",
    ]


def test_importing_starts_no_cuda_and_loads_no_plots():
    # what transformers loads for its own part is not ours, and differs between its versions
    code = (
        "import sys, transformers.modeling_utils, transformers.masking_utils, transformers; "
        "transformers.Trainer, transformers.BertForMaskedLM, transformers.OPTForCausalLM; before = set(sys.modules); "
        "import outeffhop, torch; assert not torch.cuda.is_initialized(); "
        "heavy = ('matplotlib', 'tyro', 'scipy.stats', 'IPython'); "
        "print([m for m in heavy if m in sys.modules and m not in before])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_all_names_exist():
    for name in outeffhop.__all__:
        assert getattr(outeffhop, name) is not None
