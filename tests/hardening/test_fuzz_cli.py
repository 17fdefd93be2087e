"""Random argument lists to every command: exit code 0, 1 or 2, an error of one line, never a traceback."""

import contextlib
import io
import os

import pytest
from fuzzing import cases, command, one_line
from hypothesis import example, given
from hypothesis import strategies as st

from outeffhop.cli.main import _COMMANDS, main
from outeffhop.lab.training import RunFolder

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
        "--batches",
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
    said = [line for line in err.splitlines() if line.startswith("outeffhop: ") and "warning: " not in line]
    assert len(said) == (code != 0), err  # others may say how far it got


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


ODD = os.fsdecode(b"caf\xe9")  # a name of bytes that are not UTF-8, as old archives have them
TINY = ["--train.max-steps", 1, "--train.batch-size", 2, "--train.eval-batches", 1, "--train.outlier-batches", 1]
TINY += ["--samples.length", 16, "--samples.vocab-size", 300, "--train.device", "cpu"]
TINY += ["--changes", "num_hidden_layers", 1, "hidden_size", 16, "word_embed_proj_dim", 16, "ffn_dim", 16]


def test_names_that_are_not_utf_8(tmp_path):
    """Data may have any name, also in pages and cards; a folder that safetensors cannot write to is refused at once."""
    (tmp_path / f"{ODD}.txt").write_text("some words of text\n" * 600)
    run = ["train", "--data", f"{ODD}.txt", *TINY]
    assert command(*run, "--out", "run")[0] == 0
    assert command("outliers", "run", "--out", "out", "--batches", 1, "--batch-size", 2)[0] == 0
    assert "caf\\udce9.txt" in (tmp_path / "out" / "outliers.html").read_text()
    code, _, err = command(*run, "--out", ODD)
    assert code == 2
    one_line(err, "out='caf\\udce9' is not UTF-8")
    assert not RunFolder(ODD).exists
    (tmp_path / "run" / "model").rename(tmp_path / ODD)
    code, _, err = command("evaluate", ODD, "--data", "builtin:text")
    assert code == 2
    one_line(err, "checkpoint='caf\\udce9' is not UTF-8")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_another_encoding(encoding, tmp_path):
    (tmp_path / f"{ODD}.txt").write_text("some words of text\n" * 600)
    for arguments in (["methods"], ["presets"], ["data"], ["data", f"{ODD}.txt"]):
        screen = io.TextIOWrapper(io.BytesIO(), encoding)
        with contextlib.redirect_stdout(screen):
            assert main(arguments) == 0
            screen.flush()
        assert screen.buffer.getvalue()


@pytest.mark.parametrize(
    "changes",
    [
        ("opt", "hidden_size", 0),
        ("opt", "hidden_size", -4),
        ("opt", "num_attention_heads", 0),
        ("opt", "pad_token_id", 99999),
        ("opt", "activation_function", "nothing"),
        ("opt", "dtype", "nothing"),
        ("opt", "__class__", "x"),
        ("opt", "use_return_dict", "x"),
        ("opt", "to_dict", "x"),
        ("opt", "_attn_implementation", "someone/kernel"),
        ("bert", "hidden_act", "nothing"),
    ],
    ids=str,
)
def test_changes_that_no_model_can_have(changes):
    model, name, value = changes
    code, out, err = command("train", "--model", model, "--data", "builtin:text", "--dry-run", "--changes", name, value)
    assert code == 2
    assert out == ""
    one_line("\n".join(line for line in err.splitlines() if "no-op" not in line), name)


def test_a_length_beyond_the_model_and_a_device_without_numbers(tmp_path):
    assert command("train", "--data", "builtin:text", "--out", "run", *TINY)[0] == 0
    code, _, err = command("evaluate", "run", "--length", 500, "--batches", 1)
    assert code == 2
    one_line(err, "length=500: the model of 'run/model' has 128 positions")
    code, _, err = command("evaluate", "run", "--device", "meta", "--batches", 1)
    assert code == 2
    one_line(err, "device='meta' holds shapes only")
