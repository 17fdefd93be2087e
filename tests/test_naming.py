"""Error messages for unknown names and missing packages."""

import json
import re
import sys

import pytest

from outeffhop._naming import did_you_mean, known, require

NAMES = ("vanilla", "outeffhop", "clipped")


def test_a_known_name_comes_back():
    assert known("method", "clipped", NAMES) == "clipped"


@pytest.mark.parametrize(("value", "nearest"), [("vanila", "vanilla"), ("xyz", None), (3, None)])
def test_an_unknown_name_is_refused_with_what_there_is(value, nearest):
    with pytest.raises(ValueError, match=re.escape(f"method={value!r}")) as caught:
        known("method", value, NAMES)
    said = str(caught.value)
    assert all(name in said for name in NAMES)
    assert ("did you mean" in said) == (nearest is not None)
    assert nearest is None or f"did you mean {nearest!r}" in said


def test_several_may_be_near():
    said = did_you_mean("gated-outefhop", ["gated", "gated-outeffhop", "sparse"], n=2)
    assert said.index("'gated-outeffhop'") < said.index("'gated'")
    assert "sparse" not in said


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
