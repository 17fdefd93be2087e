"""``outeffhop data`` as a user meets it."""

import json

import pytest

from outeffhop.cli.main import main
from outeffhop.lab.data.specs import BUILTIN


def test_what_there_is(capsys):
    assert main(["data"]) == 0
    out = capsys.readouterr().out
    for word in (*(f"builtin:{name}" for name in BUILTIN), "hub:NAME[/CONFIG]", "csv", "forecasting"):
        assert word in out


def test_what_there_is_as_json(capsys):
    assert main(["data", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["builtin"]) == [f"builtin:{name}" for name in BUILTIN]
    assert found["tasks"]["mlm"] == "text"


def test_what_a_spec_would_give(capsys):
    assert main(["data", "builtin:series"]) == 0
    out = capsys.readouterr().out
    for word in ("serves forecasting", "2,800 rows", "validation", "series6", "2020-01-01T02"):
        assert word in out


def test_a_path_as_json(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    assert main(["data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "text"
    assert found["samples"][0].startswith("line 0 line 1")
    assert sum(split["characters"] for split in found["splits"].values()) == 790


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["builtin:txt"], "outeffhop: builtin='txt' is unknown; did you mean 'text'? Available:"),
        (["builtin:text", "--task", "forecasting"], "outeffhop: data spec 'builtin:text' contains text, but task"),
        (["no/such/path"], "outeffhop: data spec 'no/such/path': no such path"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments, message, capsys):
    assert main(["data", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)


def test_help_fits_a_screen(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["data", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert "outeffhop data builtin:text" in out
