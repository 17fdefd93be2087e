"""A disk that is full, and a folder that cannot be written to: said at once or in the end, and nothing is lost.

The disks are real, of a few hundred kB, and mounted for one process alone. More of training on a full disk is in
tests/lab/training/test_train.py.
"""

import json
import re

import pytest
from architectures import VOCAB, build
from safetensors.torch import load_file
from trained_look import look_trained

from outeffhop.lab.data import prepare
from outeffhop.lab.diagnosis import DiagnosisReport
from outeffhop.lab.mending import MendReport
from outeffhop.lab.paper.energy_landscape import EXPERIMENT
from outeffhop.lab.paper.experiment import Settings
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.training import RunFolder
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.outliers import OutlierReport
from outeffhop.quantization import QuantizationReport

FULL = "No space left on device"
SIZES = ["--changes", "e_layers", 1, "d_model", 16, "d_ff", 32, "num_heads", 2]
QUICK = ["--data", "builtin:series", "--device", "cpu", "--batch-size", 4]


def train(out, *flags):
    often = [("save-steps", 2), ("log-steps", 1), ("batch-size", 4), ("eval-batches", 1), ("outlier-batches", 1)]
    named = [word for name, value in (*often, ("device", "cpu")) for word in (f"--train.{name}", value)]
    run = ["--model", "stanhop", "--data", "builtin:series", "--train.max-steps", 6, "--out", out]
    return ["command", "train", *run, *named, *SIZES, *flags]


def outliers(checkpoint, out):
    return ["command", "outliers", checkpoint, *QUICK, "--out", out, "--batches", 1]


def quantize(checkpoint, out):
    return ["command", "quantize", checkpoint, *QUICK, "--out", out, "--seeds", 1, "--batches", 1]


def reproduce(out):
    return ["command", "reproduce", "energy", "--quick", "--device", "cpu", "--out", out]


TEXT = ["--data", "builtin:text", "--device", "cpu", "--batch-size", 2, "--length", 16]
FEW = ["--batches", 1, "--calibration-batches", 1]


def diagnose(checkpoint, out):
    return ["command", "diagnose", checkpoint, *TEXT, *FEW, "--out", out, "--no-int8"]


def mend(checkpoint, out):
    return ["command", "mend", checkpoint, *TEXT, *FEW, "--steps", 4, "--out", out]


def save(checkpoint, saved, *more):
    linear = ["--scheme", "linear", "--seeds", 1, "--save", saved]
    return ["command", "quantize", checkpoint, *TEXT, *FEW, *linear, *more]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint that looks trained, and what its files hold; it must never change."""
    folder = tmp_path_factory.mktemp("original") / "llama"
    look_trained(build("LlamaForCausalLM")).save_pretrained(folder)
    prepared = prepare("builtin:text", "clm", vocab_size=VOCAB, cache_dir=folder.parent / "tokens")
    prepared.tokenizer.save_pretrained(folder)
    before = contents(folder)
    yield folder
    assert contents(folder) == before


@pytest.fixture(scope="module")
def mended(original, server, tmp_path_factory):
    """A mending that nothing disturbed."""
    out = tmp_path_factory.mktemp("mended") / "out"
    codes, said = server.run(mend(original, out))
    assert codes == [0], said
    return out


def check_same_mending(first, second):
    assert MendReport.load(first / "mend.json").after == MendReport.load(second / "mend.json").after
    assert contents(first / "model").keys() == contents(second / "model").keys()
    weights = [(out / "model" / "model.safetensors").read_bytes() for out in (first, second)]
    assert weights[0] == weights[1]


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def run(server, tmp_path_factory):
    """A whole one, to hold others against and to measure."""
    out = tmp_path_factory.mktemp("whole") / "run"
    codes, said = server.run(train(out))
    assert codes == [0], said
    return out


@pytest.fixture
def disk(mounts, tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def hidden(folder):
    return [p for p in folder.rglob(".*") if p.name != ".filling"]


def test_training_on_a_full_disk_goes_on_when_there_is_room(disk, run, server, tmp_path):
    size = sum(p.stat().st_size for p in (run / "checkpoints" / "checkpoint-6").rglob("*") if p.is_file())
    out = disk / "run"
    codes, said = server.run(
        ["tmpfs", disk, "32m"],
        ["fill", disk, int(1.8 * size)],  # one checkpoint, and not a second
        train(out),
        ["copy", disk, tmp_path / "full"],
        ["make room", disk],
        ["command", "resume", out],
        ["copy", disk, tmp_path / "room"],
    )
    assert codes == [1, 0], said
    assert re.search(rf"checkpoint 4 could not be written \(.*{FULL}", said)
    assert f"the last checkpoint, {out}/checkpoints/checkpoint-2, is whole" in said
    assert RunFolder(tmp_path / "full" / "run").last_checkpoint().name == "checkpoint-2"
    assert hidden(tmp_path / "full") == []
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "room" / "run", run))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    lines = [[line.get("loss") for line in RunFolder(f).metrics()] for f in (tmp_path / "room" / "run", run)]
    assert lines[0] == lines[1]


def test_training_on_a_disk_that_was_always_full(disk, server, tmp_path):
    codes, said = server.run(
        ["tmpfs", disk, "1m"], ["fill", disk], train(disk / "run"), ["copy", disk, tmp_path / "full"]
    )
    assert codes == [1], said
    assert said.splitlines()[-1].startswith("outeffhop: ")
    assert FULL in said
    assert f"{disk}/run/config.yaml" in said
    assert "Traceback" not in said
    assert not RunFolder(tmp_path / "full" / "run").exists


def test_tokens_on_a_full_disk(disk, server, tmp_path):
    kept = ["--samples.cache-dir", disk / "cache", "--samples.vocab-size", 300]
    codes, said = server.run(
        ["tmpfs", disk, "1m"],
        ["fill", disk, 100_000],
        ["command", "train", "--model", "opt", "--data", "builtin:text", "--out", tmp_path / "run", *kept],
        ["copy", disk, tmp_path / "full"],
    )
    assert codes == [1], said
    assert f"tokens could not be written to cache_dir='{disk}/cache' ({FULL})" in said
    assert all(p.name.startswith("tokenizer-") for p in (tmp_path / "full" / "cache").iterdir())
    assert not RunFolder(tmp_path / "run").exists


def test_measuring_on_a_full_disk_keeps_the_files_of_before(disk, run, server, tmp_path):
    codes, said = server.run(
        ["tmpfs", disk, "1m"],
        outliers(run, disk / "out"),
        ["copy", disk / "out", tmp_path / "before"],
        ["fill", disk],
        outliers(run, disk / "out"),
        quantize(run, disk / "out"),
        ["copy", disk / "out", tmp_path / "full"],
        ["make room", disk],
        quantize(run, disk / "out"),
    )
    assert codes == [0, 1, 1, 0], said
    for name in ("outliers.json", "quantization.json"):
        assert f"outeffhop: [Errno 28] {FULL}: '{disk}/out/{name}'" in said
    before, full = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("before", "full"))
    assert before == full
    assert OutlierReport.load(tmp_path / "full" / "outliers.json").samples == 4


def test_a_checkpoint_to_deploy_on_a_full_disk(disk, server, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    presets.build("vit", "tiny", "vanilla").save_pretrained(tmp_path / "vit")
    linear = ["--data", "builtin:images", "--scheme", "linear", "--seeds", 1, "--batches", 1, "--batch-size", 4]
    save = ["command", "quantize", tmp_path / "vit", *linear, "--device", "cpu", "--save", disk / "saved"]
    codes, said = server.run(
        ["tmpfs", disk, "16m"],
        ["fill", disk, 50_000],
        save,
        ["copy", disk, tmp_path / "full"],
        ["make room", disk],
        save,
        ["copy", disk, tmp_path / "room"],
    )
    assert codes == [1, 0], said
    assert FULL in said
    assert "Traceback" not in said
    assert [p for p in (tmp_path / "full").iterdir() if p.name != ".filling"] == []
    assert load_checkpoint(tmp_path / "room" / "saved").config.quantization_config is not None


def test_a_diagnosis_on_a_full_disk_keeps_the_one_of_before(disk, original, server, tmp_path):
    codes, said = server.run(
        ["tmpfs", disk, "2m"],
        diagnose(original, disk / "out"),
        ["copy", disk / "out", tmp_path / "before"],
        ["fill", disk],
        diagnose(original, disk / "out"),
        ["copy", disk / "out", tmp_path / "full"],
        ["make room", disk],
        diagnose(original, disk / "out"),
    )
    assert codes == [0, 1, 0], said
    assert said.count("outeffhop: ") == 1
    assert f"outeffhop: [Errno 28] {FULL}: '{disk}/out/diagnosis.json'" in said
    assert contents(tmp_path / "before") == contents(tmp_path / "full")
    assert DiagnosisReport.load(tmp_path / "full" / "diagnosis.json").samples == 2


SLOW = pytest.mark.slow


@pytest.mark.parametrize("left", [pytest.param(0, marks=SLOW), 30_000, pytest.param(400_000, marks=SLOW)])
def test_a_mending_on_a_full_disk_goes_on_when_there_is_room(left, disk, original, mended, server, tmp_path):
    """Full from the beginning, before the fine-tuning, and in its checkpoints."""
    out = disk / "out"
    codes, said = server.run(
        ["tmpfs", disk, "16m"],
        ["fill", disk, left],
        mend(original, out),
        ["copy", disk, tmp_path / "full"],
        ["make room", disk],
        [*mend(original, out), "--resume", "auto"],
        ["copy", disk, tmp_path / "room"],
    )
    assert codes == [1, 0], said
    assert said.count("outeffhop: ") == 1
    assert FULL in said
    full = tmp_path / "full" / "out"
    assert not (full / "model").exists()
    assert not (full / "mend.json").exists()
    for file in full.rglob("*.json"):
        json.loads(file.read_text())
    assert hidden(tmp_path / "full") == []
    check_same_mending(tmp_path / "room" / "out", mended)


def test_an_experiment_on_a_full_disk_goes_on_when_there_is_room(disk, server, tmp_path):
    codes, said = server.run(
        ["tmpfs", disk, "4m"],
        ["fill", disk, 8192],  # the file of the first cells and its successor; pages are of 4096
        reproduce(disk / "results"),
        ["copy", disk, tmp_path / "full"],
        ["make room", disk],
        reproduce(disk / "results"),
        ["copy", disk, tmp_path / "room"],
    )
    assert codes == [1, 0], said
    assert f"[Errno 28] {FULL}: '{disk}/results/energy.json'" in said
    cells = ResultFile.load(tmp_path / "full" / "results" / "energy.json").cells
    every = EXPERIMENT.cells(Settings(quick=True))
    assert 0 < len(cells) < len(every)
    assert all(cell.found for cell in cells.values())
    assert f"{len(cells)} of {len(every)} cells were measured earlier" in said
    assert (tmp_path / "room" / "results" / "report.html").read_text().endswith("</html>\n")


def test_a_full_terminal(server):
    """/dev/full in stdout's place: the command says so and fails."""
    codes, said = server.run(["print to", "/dev/full"], ["command", "methods", "--json"])
    assert codes == [1], said
    assert FULL in said


REFUSED = "cannot be written to"


def test_a_read_only_folder_is_refused_before_any_work(mounts, run, original, server, tmp_path):
    target = tmp_path / "read-only"
    target.mkdir()
    codes, said = server.run(
        ["read-only", target],
        train(target / "run"),
        outliers(run, target / "out"),
        quantize(run, target / "out"),
        ["command", "evaluate", run, "--out", target],
        reproduce(target / "results"),
        diagnose(original, target / "out"),
        mend(original, target / "out"),
        save(original, target / "saved"),
    )
    assert codes == [2] * 8, said
    assert said.count(REFUSED) == len(said.splitlines()) == 8  # no progress before it
    assert list(target.iterdir()) == []


def test_a_run_in_a_read_only_folder_can_be_measured_but_not_gone_on_with(mounts, run, server, tmp_path):
    (run / "result.json").rename(tmp_path / "result.json")
    try:
        codes, said = server.run(["read-only", run], ["command", "resume", run], outliers(run, tmp_path / "out"))
    finally:
        (tmp_path / "result.json").rename(run / "result.json")
    assert codes == [2, 0], said
    assert f"outeffhop: out='{run}' {REFUSED}: Read-only file system" in said
    assert OutlierReport.load(tmp_path / "out" / "outliers.json").samples == 4


@SLOW
def test_a_checkpoint_in_a_read_only_folder_is_served(mounts, original, server, tmp_path):
    codes, said = server.run(
        ["read-only", original],
        diagnose(original, tmp_path / "diagnosis"),
        mend(original, tmp_path / "mended"),
        save(original, tmp_path / "saved"),
    )
    assert codes == [0] * 3, said
    for made in ("mended/model", "saved"):
        load_checkpoint(tmp_path / made)


def test_a_folder_below_a_file_is_refused_before_any_work(run, original, server, tmp_path):
    (tmp_path / "file").write_text("mine")
    below = tmp_path / "file" / "out"
    codes, said = server.run(
        train(below),
        outliers(run, below),
        quantize(run, below),
        ["command", "evaluate", run, "--out", below],
        diagnose(original, below),
        mend(original, below),
        save(original, below),
    )
    assert codes == [2] * 7, said
    assert len(said.splitlines()) == 7
    assert said.count("file") >= 7
    assert (tmp_path / "file").read_text() == "mine"


def test_the_second_process_on_a_run_is_refused(run, server, tmp_path):
    """By the command; how the lock behaves is in tests/lab/training/test_rundir.py."""
    with RunFolder(tmp_path / "run").locked():
        codes, said = server.run(train(tmp_path / "run"))
    assert codes == [2]
    assert said == f"outeffhop: another process is training in '{tmp_path}/run': wait for it, or stop it\n"
    assert server.run(train(tmp_path / "run"))[0] == [0]


# Two processes at once in one folder


def at_once(*commands):
    return ["at once", *(words for _, *words in commands)]


def test_two_diagnoses_into_one_folder_both_end_well(original, server, tmp_path):
    out = tmp_path / "out"
    codes, said = server.run(at_once(diagnose(original, out), diagnose(original, out)))
    assert codes == [0, 0], said
    assert {p.name for p in out.iterdir()} == {"diagnosis.json", "diagnosis.html"}
    assert DiagnosisReport.load(out / "diagnosis.json").samples == 2
    assert (out / "diagnosis.html").read_text().endswith("</html>\n")


def test_of_two_mendings_in_one_folder_one_is_refused(original, mended, server, tmp_path):
    out = tmp_path / "out"
    codes, said = server.run(at_once(mend(original, out), mend(original, out)))
    assert sorted(codes) == [0, 2], said
    refused = [line for line in said.splitlines() if line.startswith("outeffhop: ")]
    assert len(refused) == 1
    assert re.search(f"another process is training in '{out}'|out='{out}' already contains a mending", refused[0])
    check_same_mending(out, mended)


def test_of_two_that_save_into_one_folder_one_is_refused(original, server, tmp_path):
    """At once, or after its work where the other one was faster; what is there is one of them, and whole."""
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    saved, words = tmp_path / "saved", ("--out", tmp_path / "out")
    codes, said = server.run(
        save(original, tmp_path / "alone"),
        at_once(save(original, saved, *words), save(original, saved, *words)),
    )
    assert sorted(codes) in ([0, 0, 1], [0, 0, 2]), said
    # two processes write to one stream: the line may follow half a line of the other's
    refused = [part.splitlines()[0] for part in said.split("outeffhop: ")[1:]]
    assert len(refused) == 1
    assert f"{saved}" in refused[0]
    assert "is not overwritten" in refused[0]
    assert contents(saved) == contents(tmp_path / "alone")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["quantization.json"]
    assert QuantizationReport.load(tmp_path / "out" / "quantization.json").saved.path == str(saved)
    assert hidden(tmp_path) == []
