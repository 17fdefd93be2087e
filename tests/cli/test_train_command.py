"""``outeffhop train`` and ``resume`` as a user meets them: flags, config files, dry runs, refusals."""

import json
import os
import signal

import pytest
import torch
import yaml

from outeffhop.cli.console import speaks
from outeffhop.cli.main import main
from outeffhop.lab.training import Result, RunFolder
from outeffhop.lab.training.trainer import RunTrainer

# a model of next to nothing: these tests are about the command
SMALL = ["--changes", "hidden_size", "16", "num_hidden_layers", "1", "num_attention_heads", "2", "ffn_dim", "16"]
SHORT = [
    "--samples.length",
    "16",
    "--train.batch-size",
    "4",
    "--train.eval-batches",
    "1",
    "--train.outlier-batches",
    "1",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory, monkeypatch):
    """A user's folder, apart from the cache of tokens."""
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path_factory.mktemp("user"))


def train(*flags):
    return main(["train", "--model", "opt", "--data", "builtin:text", *SMALL, *SHORT, *flags])


def refused(capsys, arguments):
    """Exit code 2, nothing on stdout, no traceback."""
    try:
        code = main(arguments)
    except SystemExit as ended:  # the parser's own way
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    return printed.err


def test_flags_end_up_in_the_config_and_the_numbers_on_stdout(capsys):
    flags = ["--train.lr", "1e-3", "--train.max-steps", "2", "--train.seed", "3", "--train.log-steps", "1"]
    assert train("--method", "gated-outeffhop", "--out", "runs/a", *flags) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0].startswith("step 1/2  loss ")  # plain lines where there is no terminal
    for words in ("runs/a after 2 steps", "perplexity", "max inf norm", "next: outeffhop diagnose runs/a"):
        assert words in printed.out
    config = RunFolder("runs/a").config()
    assert (config.method, config.train.lr, config.train.seed) == ("gated-outeffhop", 1e-3, 3)
    assert config.changes == {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}


def test_a_config_file_and_flags_that_win_over_it(capsys):
    values = {"model": "opt", "data": "builtin:text", "train": {"max_steps": 2, "lr": 4e-4, "seed": 5}}
    with open("my.yaml", "w") as file:
        yaml.safe_dump(values, file)
    command = ["train", "--config", "my.yaml", "--out", "a", "--train.lr", "1e-3", *SMALL, *SHORT, "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 2
    assert found["metrics"]["loss"] > 0
    config = RunFolder("a").config()
    assert (config.train.max_steps, config.train.lr, config.train.seed) == (2, 1e-3, 5)
    # and a run's own config is such a file
    assert main(["train", "--config=a/config.yaml", "--out", "b", "--train.seed", "6", "--json"]) == 0
    assert RunFolder("b").config().train.lr == 1e-3


def plan(capsys, *flags):
    """The config of a dry run."""
    assert main(["train", *flags, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["config"]


def test_changes_of_the_file_and_of_flags(capsys):
    """Those of the file stay, but for the ones a flag names."""
    with open("my.yaml", "w") as file:
        yaml.safe_dump({"data": "builtin:text", "changes": {"num_hidden_layers": 1, "ffn_dim": 32}}, file)
    found = plan(capsys, "--config", "my.yaml", "--changes", "ffn_dim", "16", "dropout", "0.5")
    assert found["changes"] == {"num_hidden_layers": 1, "ffn_dim": 16, "dropout": 0.5}
    assert plan(capsys, "--config", "my.yaml")["changes"] == {"num_hidden_layers": 1, "ffn_dim": 32}


def test_of_two_files_the_last_one_counts(capsys):
    for name, lr in (("one.yaml", 0.25), ("two.yaml", 0.5)):
        with open(name, "w") as file:
            yaml.safe_dump({"data": "builtin:text", "train": {"lr": lr}}, file)
    assert plan(capsys, "--config", "one.yaml", "--config=two.yaml", *SMALL)["train"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("flag", "right"),
    [("--train.max-stepz", "--train.max-steps"), ("--metod", "--method"), ("--samples.lenght", "--samples.length")],
)
def test_an_unknown_flag_gets_the_nearest_right_one(flag, right, capsys):
    assert right in refused(capsys, ["train", "--data", "builtin:text", "--out", "a", flag, "3"])
    assert not os.listdir()


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("modle: opt", "'model'"),
        ("train: {max_stepz: 3}", "'max_steps'"),
        ("train: {max_steps: many}", "train.max_steps='many': must be an integer"),
        ("train: [1]", "a mapping"),
        ("{", "is not YAML"),
    ],
)
def test_a_wrong_config_file_is_refused_by_key(text, right, capsys):
    with open("my.yaml", "w") as file:
        file.write(text)
    error = refused(capsys, ["train", "--config", "my.yaml", "--data", "builtin:text", "--out", "a"])
    assert "my.yaml" in error
    assert right in error
    assert os.listdir() == ["my.yaml"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "a"], "data is missing"),
        (["--data", "builtin:text"], "out is missing"),
        (["--data", "builtin:txt", "--out", "a"], "did you mean 'text'"),
        (["--data", "builtin:images", "--out", "a"], "needs text"),
        (["--data", "builtin:text", "--out", "a", "--method", "outefhop"], "did you mean 'outeffhop'"),
        (["--data", "builtin:text", "--out", "a", "--model", "optt"], "opt"),
        (["--data", "builtin:text", "--out", "a", "--train.batch-size", "0"], "train.batch_size=0"),
        (["--data", "builtin:text", "--out", "a", "--train.precision", "fp16"], "train.precision='fp16' needs a GPU"),
        (["--data", "builtin:text", "--out", "a", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_trained(flags, words, capsys):
    assert words in refused(capsys, ["train", *flags])
    assert not RunFolder("a").exists  # the right command can have the folder


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(capsys):
    flags = ["--train.max-steps", "10", "--dry-run"]
    assert train(*flags) == 0
    text, costs = capsys.readouterr().out.split("What it will cost\n")
    config = yaml.safe_load(text)
    assert (config["train"]["max_steps"], config["train"]["warmup_steps"]) == (10, 100)  # the recipe filled in
    for name in ("parameters", "samples per step", "tokens per step", "epochs", "time, roughly", "memory, roughly"):
        assert f"  {name}  " in costs
    assert train(*flags, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == config
    assert found["estimate"]["tokens_per_step"] == 4 * 16
    assert found["estimate"]["parameters"] > 1024 * 16
    assert not os.listdir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_refuses_what_training_would(capsys):
    command = ["train", "--data", "builtin:text", "--dry-run"]
    assert "train.device='cuda'" in refused(capsys, [*command, "--train.device", "cuda"])
    assert "train.precision='fp16' needs a GPU" in refused(capsys, [*command, "--train.precision", "fp16"])


def test_numbers_that_are_not_finite_are_json_all_the_same(monkeypatch, capsys):
    ended = Result(2, {"perplexity": float("inf")}, max_inf_norm=1.0, avg_kurtosis=float("nan"), stopped_early=False)
    monkeypatch.setattr("outeffhop.cli.train.train_run", lambda *_, **__: ended)
    assert train("--out", "a", "--json") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # which NaN and Infinity are
    assert (found["metrics"]["perplexity"], found["avg_kurtosis"]) == ("inf", "nan")


def test_a_folder_in_use_is_left_alone(capsys):
    os.makedirs("mine")
    with open("mine/notes.txt", "w") as file:
        file.write("mine")
    assert "other files" in refused(capsys, ["train", "--data", "builtin:text", "--out", "mine"])
    assert os.listdir("mine") == ["notes.txt"]
    assert train("--out", "a", "--train.max-steps", "1", "--json") == 0
    before = {path: path.read_bytes() for path in RunFolder("a").path.rglob("*") if path.is_file()}
    capsys.readouterr()
    error = refused(capsys, ["train", "--data", "builtin:text", "--out", "a"])
    assert "outeffhop resume a" in error
    assert "finished" in refused(capsys, ["resume", "a"])
    assert {path: path.read_bytes() for path in RunFolder("a").path.rglob("*") if path.is_file()} == before


def test_resume_auto_of_a_finished_run_says_its_numbers_again(capsys):
    assert train("--out", "a", "--train.max-steps", "1", "--json") == 0
    first = capsys.readouterr().out
    assert train("--out", "a", "--train.max-steps", "1", "--json", "--resume", "auto") == 0
    assert capsys.readouterr().out == first


def test_what_is_no_run_cannot_be_resumed(capsys):
    assert "'nothing' is not a run" in refused(capsys, ["resume", "nothing"])
    assert not os.listdir()


def test_an_interrupted_run_says_how_to_go_on(capsys):
    step = RunTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", interrupted)
        assert train("--out", "a", "--train.max-steps", "5", "--train.log-steps", "1") == 130
    assert capsys.readouterr().err == "outeffhop: interrupted; to continue: outeffhop resume a\n"
    assert RunFolder("a").last_checkpoint().name == "checkpoint-3"
    os.makedirs("a/checkpoints/checkpoint-4")  # as a disk might have torn it
    assert main(["resume", "a", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["steps"] == 5
    assert printed.err.startswith("outeffhop: warning: a/checkpoints/checkpoint-4 is skipped")
    assert ".py" not in printed.err


def test_of_several_processes_the_first_one_speaks(monkeypatch):
    assert speaks()
    monkeypatch.setenv("RANK", "1")
    assert not speaks()
