"""``outeffhop reproduce``: what it lists, prints, writes and refuses."""

import json
import subprocess
import sys

import pytest

from outeffhop.cli.main import main
from outeffhop.cli.reproduce import show
from outeffhop.lab.paper.experiment import Result, Table, Verdict
from outeffhop.lab.paper.registry import NAMES, find


def test_without_a_name_it_lists_what_there_is(capsys):
    assert main(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(NAMES)
    assert "Figure 1" in out
    assert main(["reproduce", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(e["name"], e["of"]) for e in listed] == [(name, find(name).of) for name in NAMES]


def test_an_experiment_from_beginning_to_page(tmp_path, capsys):
    arguments = ["reproduce", "energy", "--quick", "--out", str(tmp_path), "--device", "cpu"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    for words in ("Figure 1", "CONFIRMED: The zero-energy point", "eigenvalue 3.00", "these numbers mean nothing"):
        assert words in captured.out
    assert "14 of 14" in captured.err
    assert "energy" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "energy" / "energy.png").exists()
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert "14 of 14 cells were measured earlier" in captured.err
    assert json.loads(captured.out)[0] == json.loads((tmp_path / "energy.json").read_text())["result"]


def test_best_and_second_best_are_marked(capsys):
    table = Table("T", ["model", "error"], [["a", "3 ± 0.5"], ["b", 1.25], ["c", 2]], {"error": "low"}, note="of three")
    show(Result("n", "Table 9", "about it", [table], verdicts=[Verdict("claim", "not seen", "1 of 2")]))
    out = capsys.readouterr().out
    for words in ("a      3 ± 0.5", "b      1.25 *", "c      2 +", "* best, + second best", "of three"):
        assert words in out
    assert "3 ± 0.5 " not in out
    assert "NOT SEEN: claim\n    1 of 2" in out


def test_what_is_not_measured_is_left_empty(capsys):
    show(
        Result(
            "n", "Table 9", "about it", [Table("T", ["model", "error", "rank"], [["a", None, 3], ["b", 23341.5, 1]])]
        )
    )
    out = capsys.readouterr().out
    assert "None" not in out
    assert "b      23342  1" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["enrgy"], "name='enrgy' is unknown; did you mean 'energy'"),
        (["energy", "--seeds", "0"], "seeds=0"),
        (["energy", "--workers", "0"], "workers=0"),
        (["energy", "--data", "nowhere"], "data='nowhere' is not a folder"),
        (["mil", "--scale", "small"], "needs the folder 'mil'"),
        (["all", "--scale", "small"], "needs the folder"),
        (["all", "--quick", "--only", "opt-*"], "only='opt-*': matches no cell of table2"),
        (["energy", "--device", "banana"], "device='banana'"),
        (["enrgy", "--dry-run"], "name='enrgy' is unknown; did you mean 'energy'"),
        (["energy", "--dry-run", "--seeds", "0"], "seeds=0"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(arguments, says, tmp_path, capsys):
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "results"), *device]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_needs_neither_data_nor_a_gpu(name, tmp_path, capsys):
    arguments = ["reproduce", name, "--scale", "paper", "--dry-run", "--out", str(tmp_path / "results")]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["experiment"] for row in rows} == {name}
    assert rows[0].keys() == {"experiment", "part", "setting", "ours", "paper", "source", "note"}
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"{find(name).of} ({name})" in out
    assert all(row["setting"] in out for row in rows)
    assert not (tmp_path / "results").exists()


def test_a_dry_run_shows_what_was_asked_for(capsys):
    command = ["reproduce", "table1", "--scale", "paper", "--dry-run", "--json", "--only", "opt-*", "--seeds", "5"]
    assert main([*command, "--text", "hub:mine", "--tokenizer", "my/tokenizer"]) == 0
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert {row["part"] for row in rows.values()} == {"opt"}
    assert (rows["data"]["ours"], rows["tokenizer"]["ours"], rows["repeats"]["ours"]) == ("hub:mine", "my/tokenizer", 5)
    assert all(rows[name]["note"] == "differs" for name in ("data", "tokenizer", "repeats"))


def test_ten_repeats_are_the_default_where_the_paper_has_them(capsys):
    for scale, count in (("paper", 10), ("small", 3)):
        assert main(["reproduce", "table2", "--scale", scale, "--dry-run", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["ours"] for row in rows if row["setting"] == "repeats"] == [count]


@pytest.mark.parametrize(
    ("arguments", "says"), [(["cost"], "name='cost' measures time"), (["energy", "--workers", "2"], "workers=2")]
)
def test_what_torchrun_cannot_do(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "results"), "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.timeout(300)
def test_processes_of_torchrun_measure_a_cell_together(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "outeffhop",
    ]
    command += ["reproduce", "table1", "--quick", "--only", "opt-vanilla-0", "--device", "cpu", "--out", str(tmp_path)]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)[0]["cells"] == ["opt-vanilla-0"]  # printed once
    run = tmp_path / "table1" / "runs" / "tiny-quick-opt-vanilla-4steps-seed0"
    assert json.loads((run / "env.json").read_text())["processes"] == 2
    assert not (run / "checkpoints").exists()
    assert json.loads((tmp_path / "table1.json").read_text())["cells"].keys() == {"opt-vanilla-0"}
