"""The tool that kills commands at random moments: that it sees what must not be, and some of its kills.

`make kills` kills a hundred times and keeps the outcome in benchmarks/results/kills.json.
"""

import json

import kills
import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def run(tmp_path):
    """What a command might have left."""
    place = tmp_path / "place"
    (place / "out" / "model").mkdir(parents=True)
    save_file({"weight": torch.arange(100.0)}, place / "out" / "model" / "model.safetensors")
    (place / "out" / "result.json").write_text('{"loss": 1.5, "seconds": 3.0, "train_runtime": 2.0}')
    (place / "out" / "page.html").write_text("<html>It took 3 s.</html>\n")
    (place / "out" / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    (place / "out" / ".page.html.1a2b3c4d.tmp").write_text("<ht")
    return place


def test_times_and_hidden_files_make_no_difference(run):
    kills.check_whole(run)
    (run / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    before = kills.contents(run)
    (run / "out" / "result.json").write_text('{"loss": 1.5, "seconds": 4.0, "train_runtime": 5.0}')
    (run / "out" / "page.html").write_text("<html>It took 9 s.</html>\n")
    assert kills.differences(kills.contents(run), before) == []
    assert kills.leftovers(run) == ["out/.page.html.1a2b3c4d.tmp"]


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("out/model/model.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\1")),
        ("out/result.json", lambda p: p.write_text('{"loss": 1.6}')),
        ("out/page.html", lambda p: p.unlink()),
        ("out/new", lambda p: p.write_text("")),
    ],
)
def test_a_difference_is_named(name, harm, run):
    (run / "out" / "metrics.jsonl").unlink()
    before = kills.contents(run)
    harm(run / name)
    assert kills.differences(kills.contents(run), before) == [name]


@pytest.mark.parametrize("name", ["model/model.safetensors", "result.json", "page.html"])
def test_half_a_file_is_named(name, run):
    file = run / "out" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"{name} is not whole"):
        kills.check_whole(run)


def test_the_kept_outcome_has_a_hundred_kills_over_the_whole_time_of_each_command():
    if not kills.RESULT.is_file():
        pytest.skip("the results are not in a source distribution")
    kept = json.loads(kills.RESULT.read_text())
    assert (kept["kills"], kept["failed"]) == (100, 0)
    assert {name: each["kills"] for name, each in kept["commands"].items()} == kills.SHARE
    for each in kept["commands"].values():
        moments = each["moments (shares of these seconds)"]
        assert len(moments) == each["kills"]
        assert min(moments) < 0.3 < 0.6 < max(moments)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", kills.COMMANDS)
def test_killed_at_random_it_ends_as_if_nothing_had_happened(command, server, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    found = kills.Killer(server, tmp_path).kill(command, 4, seed=1)
    assert found.kills == 4
    assert found.failed == []
