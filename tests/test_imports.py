"""The layers of the package: imports go one way, and importing it starts nothing."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import outeffhop

ROOT = Path(outeffhop.__file__).parent
# Left to right as data flows; a module may import from its own layer and from those before it.
LAYERS = [
    ["_naming"],
    ["_io"],
    ["_dataclass_io"],
    ["functional"],
    ["methods"],
    ["ops"],
    ["state"],
    ["memory", "nn"],
    ["metrics"],
    ["models"],
    ["outliers"],
    ["quantization"],
    ["lab/data"],
    ["lab/training"],
    ["lab/paper"],
    ["lab/report"],
    ["lab/diagnosis"],
    ["lab/mending"],
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


HEAVY = ("torch._dynamo", "transformers", "scipy", "sklearn", "matplotlib", "datasets", "accelerate", "tyro")


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def loaded_by(statement):
    return set(
        run_python(f"import sys; {statement}; print(*[m for m in {('torch', *HEAVY)} if m in sys.modules])").split()
    )


def test_importing_loads_nothing_heavy():
    assert loaded_by("import outeffhop") == set()
    assert loaded_by("import outeffhop; outeffhop.methods.METHODS") == set()
    assert loaded_by("import outeffhop.cli.options") <= {"tyro"}


@pytest.mark.parametrize("name", ["functional", "ops", "state", "nn", "memory"])
def test_the_layers_below_the_models_need_torch_alone(name):
    assert loaded_by(f"import outeffhop.{name}") == {"torch"}


@pytest.mark.parametrize(
    "use",
    [
        "outliers.measure",
        pytest.param("outliers.OutlierReport", marks=pytest.mark.slow),
        "quantization.evaluate",
        pytest.param("models.presets.SIZES", marks=pytest.mark.slow),
        "nn.OutEffHop",
        pytest.param("memory.theory.separation", marks=pytest.mark.slow),
        "methods.METHODS",
        pytest.param("ops.attention", marks=pytest.mark.slow),
        pytest.param("explain", marks=pytest.mark.slow),
        pytest.param("lab.training.train", marks=pytest.mark.slow),
        pytest.param("lab.data.prepare", marks=pytest.mark.slow),
        pytest.param("lab.paper.run", marks=pytest.mark.slow),
    ],
)
def test_names_work_after_importing_the_package_alone(use):
    run_python(f"import outeffhop; outeffhop.{use}")


LIGHT = ("outeffhop.lab.data", "outeffhop.lab.training.config", "outeffhop.outliers.outlier_report")


@pytest.mark.parametrize("name", LIGHT)
def test_help_and_reports_need_no_torch(name):
    """The command line builds its help from these; packages above them are replaced by empty ones."""
    code = (
        "import importlib, sys, types\n"
        f"root, name = {str(ROOT)!r}, {name!r}\n"
        "above = ('outeffhop', 'outeffhop.lab', 'outeffhop.lab.training')\n"
        "for package in above:\n"
        "    sys.modules[package] = types.ModuleType(package)\n"
        "    sys.modules[package].__path__ = ['/'.join([root, *package.split('.')[1:]])]\n"
        "found = importlib.import_module(name)\n"
        "assert found.__all__\n"
        "print([m for m in ('torch', 'transformers', 'yaml', 'numpy') if m in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


LAZY = ("models", "outliers", "quantization", "lab.data", "lab.training", "lab.paper", "lab.report")


@pytest.mark.parametrize("package", LAZY)
def test_lazy_packages_have_every_name_they_list(package):
    module = import_module(f"outeffhop.{package}")
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(dir(module)) >= set(module.__all__) - {"register"}  # which models imports at once
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


def test_all_names_exist():
    for name in outeffhop.__all__:
        assert getattr(outeffhop, name) is not None
    assert set(outeffhop.__all__) <= set(dir(outeffhop))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        outeffhop.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize(
    "order",
    [
        "import outeffhop, transformers",
        "import transformers, outeffhop",
        "from transformers import BertModel; import outeffhop",
        pytest.param("import outeffhop.models", marks=pytest.mark.slow),
        pytest.param("import outeffhop.quantization.fold", marks=pytest.mark.slow),
    ],
)
def test_transformers_knows_the_methods_whichever_comes_first(order):
    code = f"""
{order}
from transformers import BertConfig, AutoModel
config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
print(AutoModel.from_config(config, attn_implementation="gated").config._attn_implementation)
"""
    assert run_python(code) == "gated"
