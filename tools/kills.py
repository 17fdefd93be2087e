"""Kills commands with SIGKILL at random moments, begins them again, and compares the end with an undisturbed run.

    python tools/kills.py                      # a hundred kills, into benchmarks/results/kills.json
    python tools/kills.py --kills 3 --only train mend

A case is a command in a new folder. It is killed at a moment drawn evenly over the time it takes, and what then
continues it is killed as well in half of the cases. After every kill, each file under its final name must be whole; in
the end every file must be the one that an undisturbed run writes, apart from times. Nothing may be left over but hidden
temporary files, and none at all of ``train`` and ``mend``, which clean up. The original checkpoint must never change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "hardening"), str(ROOT / "tests" / "models")]

import faults  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import yaml  # noqa: E402
from architectures import VOCAB, build  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trained_look import look_trained  # noqa: E402

from outeffhop import __version__  # noqa: E402
from outeffhop._io import check_manifest  # noqa: E402
from outeffhop.lab.data import prepare  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "kills.json"
KILLED = -9
SHARE = {"train": 30, "mend": 30, "diagnose": 15, "quantize": 15, "reproduce": 10}  # of a hundred
TIMES = re.compile(r"seconds|began|date|.*_per_second|.*_runtime")
TIMES_IN_TEXT = re.compile(r"started \| \d[^|]+|[\d.]+ min\b|It took \d+ s|\d{4}-\d\d-\d\d")
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
Words = list[Any]


# What is killed


def _train(folder: Path) -> Words:
    """Dropout, tokens that are not cached yet, and a checkpoint at every second step."""
    often = {"max-steps": 8, "batch-size": 4, "eval-steps": 4, "eval-batches": 1, "log-steps": 1, "save-steps": 2}
    often |= {"outlier-batches": 1, "device": "cpu"}
    named = [word for name, value in often.items() for word in (f"--train.{name}", value)]
    sizes = ["num_hidden_layers", 1, "hidden_size", 32, "intermediate_size", 64, "num_attention_heads", 2]
    samples = ["--samples.length", 32, "--samples.vocab-size", 300]
    return ["train", "--model", "bert", "--data", "builtin:text", "--out", "out", *named, *samples, "--changes", *sizes]


def _mend(folder: Path) -> Words:
    quick = ["--steps", 6, "--batch-size", 4, "--length", 16, "--batches", 1, "--calibration-batches", 1]
    return ["mend", folder, "--data", "builtin:text", "--out", "out", *quick, "--device", "cpu"]


def _diagnose(folder: Path) -> Words:
    quick = ["--batch-size", 2, "--batches", 1, "--calibration-batches", 1, "--length", 16, "--device", "cpu"]
    return ["diagnose", folder, "--out", "out", "--no-int8", *quick]


def _quantize(folder: Path) -> Words:
    quick = ["--batch-size", 2, "--batches", 1, "--calibration-batches", 1, "--length", 16, "--seeds", 1]
    saved = ["--scheme", "linear", "--save", "saved", "--out", "out"]
    return ["quantize", folder, "--data", "builtin:text", *quick, *saved, "--device", "cpu"]


def _reproduce(folder: Path) -> Words:
    """A cell is a training run, and is not begun again once it is measured."""
    return ["reproduce", "table1", "--quick", "--only", "opt-*-0", "--device", "cpu", "--out", "out"]


COMMANDS: dict[str, Callable[[Path], Words]] = {
    "train": _train,
    "mend": _mend,
    "diagnose": _diagnose,
    "quantize": _quantize,
    "reproduce": _reproduce,
}


def make_checkpoint(folder: Path) -> Path:
    """A tiny model that looks trained, with its tokenizer."""
    prepared = prepare("builtin:text", "clm", vocab_size=VOCAB, cache_dir=folder / "tokens")
    look_trained(build("LlamaForCausalLM")).save_pretrained(folder / "original")
    prepared.tokenizer.save_pretrained(folder / "original")
    return folder / "original"


def continued(command: str, words: Words, place: Path, draw: random.Random) -> Words:
    """What a user types after the kill: the same again, or ``resume`` where there is something to resume."""
    begun = {"train": "config.yaml", "mend": "mend.yaml"}.get(command)
    if begun is None or not (place / "out" / begun).is_file():
        return words
    over = (place / "out" / {"train": "result.json", "mend": "mend.json"}[command]).is_file()
    if over or draw.random() < 0.5:  # `resume` of a finished run says that it is finished
        return [*words, "--resume", "auto"]
    return ["resume", "out"]


# What must hold


def files_of(place: Path) -> Iterator[Path]:
    """Every file under its final name."""
    for path in sorted(place.rglob("*")):
        inner = path.relative_to(place)
        if path.is_file() and not any(part.startswith(".") for part in inner.parts) and path.name != "run.lock":
            yield path


def check_whole(place: Path) -> None:
    """Raises a ValueError that names a file which is half written."""
    for path in files_of(place):
        try:
            _read(path)
        except Exception as error:  # whatever a reader makes of half a file
            raise ValueError(f"{path.relative_to(place)} is not whole: {error}") from error


def _read(path: Path) -> None:
    if path.name == "manifest.json" and path.parent.name.startswith("checkpoint-"):
        check_manifest(path.parent)
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".safetensors":
        load_file(path)
    elif path.suffix == ".yaml":
        yaml.safe_load(path.read_text())["out" if path.name == "mend.yaml" else "model"]
    elif path.suffix == ".png":
        Image.open(path).load()
    elif path.suffix == ".html" and not path.read_text().endswith("</html>\n"):
        raise ValueError("it ends before its end")
    elif path.name == "metrics.jsonl":  # its last line may be cut, which is known to its reader
        for line in path.read_text().split("\n")[:-1]:
            json.loads(line)


def contents(place: Path) -> dict[str, Any]:
    """What every file holds, without times; the SHA-256 of those that are not JSON."""
    return {str(path.relative_to(place)): _content(path) for path in files_of(place)}


def _content(path: Path) -> Any:
    if path.suffix == ".json" and path.name != "manifest.json":
        return without_times(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [without_times(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix in (".md", ".html"):
        return TIMES_IN_TEXT.sub("", path.read_text())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not TIMES.fullmatch(k)}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def leftovers(place: Path) -> list[str]:
    """Hidden files and folders that a kill left; the uppermost of each."""
    hidden = [p.relative_to(place) for p in place.rglob(".*")]
    return sorted(str(p) for p in hidden if not any(part.startswith(".") for part in p.parent.parts))


# Killing


@dataclass
class Killed:
    """What was found of one command."""

    kills: int = 0
    cases: int = 0
    missed: int = 0  # ended before its moment came
    seconds: float = 0.0
    moments: list[float] = field(default_factory=list)
    leftovers: int = 0
    failed: list[str] = field(default_factory=list)


class Killer:
    def __init__(self, server: Any, root: Path) -> None:
        self.server, self.root = server, root
        self.checkpoint = make_checkpoint(root)
        self.original = contents(self.checkpoint)

    def kill(self, command: str, kills: int, seed: int, tell: Callable[[str], None] = print) -> Killed:
        """Kills a command so many times, in as many cases as that takes."""
        draw, found = random.Random(f"{command} {seed}"), Killed()
        words = COMMANDS[command](self.checkpoint)
        times = []
        for name in ("first", "whole"):  # the first also imports what only this command needs
            code, said = self._run(self.root / command / name, words)
            if code != 0:
                raise RuntimeError(f"{command} ends with {code}: {said}")
            times.append(self.server.seconds)
        whole = contents(self.root / command / "whole")
        if several := differences(contents(self.root / command / "first"), whole):
            raise RuntimeError(f"two undisturbed runs of {command} differ in {several}")
        found.seconds = min(times)  # others work on the machine, too
        while found.kills < kills:
            place = self.root / command / str(found.cases)
            found.cases += 1
            try:
                self._case(command, words, place, whole, draw, found, kills)
            except (ValueError, AssertionError) as error:
                found.failed.append(f"case {found.cases - 1}: {error}")
            tell(f"{command}: {found.kills} of {kills} kills, {found.cases} cases, {len(found.failed)} failed")
            if not found.failed:
                shutil.rmtree(place)
        return found

    def _run(self, place: Path, words: Words, after: float | None = None) -> tuple[int, str]:
        place.mkdir(parents=True, exist_ok=True)
        begin = (["go to", place], ["environ", "OUTEFFHOP_CACHE", place / "cache"])
        codes, said = self.server.run(*begin, ["command", *words], after=after)
        return codes[-1], said

    def _case(
        self,
        command: str,
        words: Words,
        place: Path,
        whole: dict[str, Any],
        draw: random.Random,
        found: Killed,
        kills: int,
    ) -> None:
        following, history = words, []
        while True:
            after = draw.uniform(0, found.seconds)
            code, said = self._run(place, following, after)
            if code != KILLED:
                found.missed += 1
                if code != 0:
                    raise ValueError(f"{[*history, following]} ends with {code}: {said}")
                break
            found.kills += 1
            found.moments.append(round(after / found.seconds, 3))
            history.append(f"killed after {after:.3f} s")
            check_whole(place)
            following = continued(command, words, place, draw)
            if command == "quantize" and (place / "saved").exists():
                self._check_saved(place, words, whole)
            if found.kills >= kills or draw.random() < 0.5:
                code, said = self._run(place, following)
                if code != 0:
                    raise ValueError(f"{history}: {following} ends with {code}: {said}")
                break
        check_whole(place)
        if several := differences(contents(place), whole):
            raise ValueError(f"{history}: {several} differ from those of an undisturbed run")
        left = leftovers(place)
        if strange := [name for name in left if not TEMPORARY.fullmatch(Path(name).name)]:
            raise ValueError(f"{history}: {strange} are left over")
        if left and command in ("train", "mend") and any(name.startswith("out") for name in left):
            raise ValueError(f"{history}: {left} are left over by a command that cleans up")
        found.leftovers += len(left)
        if contents(self.checkpoint) != self.original:
            raise ValueError(f"{history}: the original checkpoint has changed")

    def _check_saved(self, place: Path, words: Words, whole: dict[str, Any]) -> None:
        """A saved checkpoint is the whole one, and not overwritten; without it, the command can begin again."""
        saved = {name: value for name, value in contents(place).items() if name.startswith("saved/")}
        if several := differences(saved, {name: value for name, value in whole.items() if name.startswith("saved/")}):
            raise ValueError(f"{several} of the saved checkpoint differ")
        code, said = self._run(place, words)
        if code != 2 or "save='saved' is not empty and is not overwritten" not in said:
            raise ValueError(f"a second time into the same folder ends with {code}: {said}")
        shutil.rmtree(place / "saved")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="of each command; by default a hundred in all")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, Killed] = {}
    with tempfile.TemporaryDirectory() as root, faults.Server() as server:
        killer = Killer(server, Path(root))
        for command in given.only:
            found[command] = killer.kill(command, given.kills or SHARE[command], given.seed)
    report = {
        "question": "Do commands that are killed at random moments end as if nothing had happened?",
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "outeffhop": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": given.seed,
        "kills": sum(each.kills for each in found.values()),
        "failed": sum(len(each.failed) for each in found.values()),
        "commands": {
            command: {
                "command": " ".join(map(str, COMMANDS[command](Path("CHECKPOINT")))),
                "kills": each.kills,
                "cases": each.cases,
                "ended before their moment": each.missed,
                "undisturbed seconds": round(each.seconds, 2),
                "moments (shares of these seconds)": sorted(each.moments),
                "hidden temporary files left": each.leftovers,
                "failed": each.failed,
            }
            for command, each in found.items()
        },
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['kills']} kills, {report['failed']} cases failed; written to {given.out}")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
