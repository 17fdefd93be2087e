"""Error messages for unknown names and missing packages."""

import json
import re
import sys

import pytest

from outeffhop._naming import did_you_mean, known, require

NAMES = ("vanilla", "outeffhop", "clipped")


def test_a_known_name_comes_back():
    assert known("method", "clipped", NAMES) == "clipped"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("vanila", "method='vanila' is unknown; did you mean 'vanilla'? Available: vanilla, outeffhop, clipped"),
        ("xyz", "method='xyz' is unknown. Available: vanilla, outeffhop, clipped"),
        (3, "method=3 is unknown. Available: vanilla, outeffhop, clipped"),
    ],
)
def test_an_unknown_name_is_refused_as_a_sentence(value, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        known("method", value, NAMES)


def test_several_may_be_near():
    assert did_you_mean("gated-outefhop", ["gated", "gated-outeffhop", "sparse"], n=2) == (
        "; did you mean 'gated-outeffhop' or 'gated'?"
    )


def test_require_imports_a_module_by_name():
    assert require("json") is json


@pytest.mark.parametrize(
    ("module", "package"), [("sklearn.datasets", "scikit-learn"), ("PIL.Image", "pillow"), ("kornia", "kornia")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)  # Python's way to block an import
    with pytest.raises(ImportError, match=rf"{package}.*pip install 'outeffhop\[lab\]'"):
        require(module)


def test_what_a_package_misses_itself_is_not_blamed_on_the_extra(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        require("half_installed")
