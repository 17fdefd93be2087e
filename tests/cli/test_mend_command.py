"""``outeffhop mend`` and ``outeffhop resume`` of a mending: what they print, write and refuse."""

import json

import pytest
from transformers import OPTConfig, OPTForCausalLM

from outeffhop.cli.main import main
from outeffhop.lab.data import prepare
from outeffhop.lab.mending import MendReport, stages

QUICK = ("--steps", "2", "--batch-size", "4", "--length", "16", "--batches", "2", "--calibration-batches", "2")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(autouse=True)
def own_cache(tokens, monkeypatch):
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tokens))


@pytest.fixture(scope="module")
def checkpoint(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "mine"
    sizes = dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2)
    OPTForCausalLM(OPTConfig(vocab_size=300, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    prepare("builtin:text", "clm", vocab_size=300, cache_dir=tokens).tokenizer.save_pretrained(folder)
    return folder


def command(checkpoint, out, *more):
    return main(["mend", str(checkpoint), "--data", "builtin:text", "--out", str(out), *QUICK, *more])


def test_it_says_what_it_found_and_where_it_is(checkpoint, tmp_path, capsys):
    assert command(checkpoint, tmp_path / "out") == 0
    said = capsys.readouterr()
    assert "as it came: outliers" in said.err
    for words in (
        "mine on builtin:text, 2 steps",
        "architecture unchanged",
        "max inf norm",
        "perplexity, floating point",
    ):
        assert words in said.out
    for name in ("model", "mend.json", "mend.html"):
        assert (tmp_path / "out" / name).exists()
        assert name in said.out


def test_json_is_the_report(checkpoint, tmp_path, capsys):
    assert command(checkpoint, tmp_path / "out", "--json") == 0
    printed = capsys.readouterr().out
    assert MendReport.from_json(printed) == MendReport.load(tmp_path / "out" / "mend.json")
    assert json.loads(printed)["summary"]["mended"]["max_inf_norm"] > 0


def test_interrupted_it_says_how_to_go_on(checkpoint, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, "_steps", stop)
        assert command(checkpoint, tmp_path / "out") == 130
    assert f"to continue: outeffhop resume {tmp_path / 'out'}" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "out")]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert command(checkpoint, tmp_path / "out", "--resume", "auto") == 0  # read again
    assert command(checkpoint, tmp_path / "out") == 2
    assert "already contains a mending" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--method", "outefhop"), "did you mean 'outeffhop'"),
        (("--minutes", "5"), "exclude each other"),
        (("--teacher", "nowhere"), "nowhere"),
        (("--penalty", "-1"), "penalty=-1"),
        (("--device", "cuda"), "cuda"),
    ],
)
def test_one_line_for_what_cannot_be(more, words, checkpoint, tmp_path, capsys):
    assert command(checkpoint, tmp_path / "out", *more) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1]
    assert not (tmp_path / "out").exists()
