"""Random argument lists to every command: exit code 0, 1 or 2, never a traceback."""

import pytest
from fuzzing import cases, command
from hypothesis import example, given
from hypothesis import strategies as st

from outeffhop.cli.main import _COMMANDS

# no process is given a zero byte among its arguments
WORDS = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["nowhere", "empty", "file", ".", "", "-", "--", "=", "~nobody", "builtin:text", "builtin:nothing"]
    ),
    st.sampled_from(
        ["outeffhop", "outeffhop(n=4)", "clipped(gamma=1)", "opt", "tiny", "W8A8", "W99A1", "cpu", "cuda:9"]
    ),
)
FLAGS = st.sampled_from(
    [
        "--json",
        "--out",
        "--data",
        "--batches",
        "--batch-size",
        "--length",
        "--tokenizer",
        "--device",
        "--limit",
        "--seeds",
        "--bits",
        "--scheme",
        "--range",
        "--split",
        "--task",
        "--tensors",
        "--help",
        "--help-all",
        "--config",
        "--model",
        "--method",
        "--preset",
        "--train.lr",
        "--train.max-steps",
        "--samples.length",
        "--changes",
        "--init",
        "--scale",
        "--workers",
        "--quick",
        "--int8",
        "--nothing",
        "--no-json",
        "-h",
        "--resume",
    ]
)
LISTS = st.lists(FLAGS | WORDS | st.tuples(FLAGS, WORDS).map("=".join), max_size=6)


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Commands run in a folder of their own, with a folder and a file to name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no data")


@pytest.mark.parametrize("name", _COMMANDS)
@cases(5)
@given(arguments=LISTS)
def test_any_arguments(name, arguments):
    arguments = [word for word in arguments if not word.startswith("hub:")]  # the network is not ours
    if name == "train":
        arguments = [*arguments, "--dry-run"]  # two thousand steps are too long for a test
    if name == "reproduce" and arguments:
        arguments = [*arguments, "--data", "nowhere"]  # as are experiments
    code, out, err = command(name, *arguments)
    assert out or err
    assert code in (0, 1, 2)


@cases(10)
@given(LISTS)
@example([])
@example(["--help"])
@example(["nothing"])
def test_no_command(arguments):
    if arguments[:1] and arguments[0] in _COMMANDS:
        return
    code, out, err = command(*arguments)
    assert out or err
    assert code in (0, 2)


@pytest.mark.parametrize("name", ["evaluate", "outliers", "quantize", "resume"])
@pytest.mark.parametrize("folder", ["empty", "file", "nowhere", "", "."])
def test_a_checkpoint_that_is_none(name, folder):
    options = ["--out", "out"] if name == "outliers" else []
    code, _, err = command(name, folder, *options)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert repr(folder or ".") in err or "''" in err or "data is missing" in err
