"""Runs the test suite with the oldest and the newest supported torch and transformers, each in its own environment.

    python tools/versions.py                                       # makes .versions/NAME once, and tests in each
    python tools/versions.py --python oldest=/path/to/bin/python   # in an existing environment
    python tools/versions.py --only oldest tests/ops tests/nn

Further arguments are passed to pytest. The outcome is added to RESULT: packages, counts and failed tests. If only a
part of the suite was run, RESULT says which. An environment takes gigabytes if torch comes with CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# None: the newest release
WANTED: dict[str, dict[str, str | None]] = {
    "oldest": {"torch": "2.11.0", "transformers": "5.17.0"},
    "newest": {"torch": "2.13.0", "transformers": None},
}
# packages whose versions follow from those of torch and transformers
ITS_OWN = {"torch", "transformers", "tokenizers", "huggingface-hub", "safetensors"}
SHOWN = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")


def make(name: str, folder: Path) -> Path:
    """The interpreter of a named environment, which is made if it does not exist."""
    python = folder / "bin" / "python"
    if (folder / ".installed").is_file():
        return python
    venv.create(folder, with_pip=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.split("==")[0] not in ITS_OWN]
    exact = [f"{package}=={version}" for package, version in WANTED[name].items() if version]
    (folder / "constraints.txt").write_text("\n".join([*kept, *exact]) + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={WANTED[name]['torch']}"], check=True)  # first and on its own, as in the Makefile
    constraints = str(folder / "constraints.txt")
    subprocess.run([*pip, "--constraint", constraints, "--editable", f"{ROOT}[dev]"], check=True)
    (folder / ".installed").touch()
    return python


def packages(python: Path) -> dict[str, str]:
    code = (
        "import json, platform; from importlib.metadata import version; "
        f"print(json.dumps({{'python': platform.python_version(), **{{n: version(n) for n in {SHOWN!r}}}}}))"
    )
    found: dict[str, str] = json.loads(subprocess.check_output([str(python), "-c", code]))
    return found


def check(name: str, found: dict[str, str]) -> None:
    """Exits if a given environment does not have the versions that its name promises."""
    for package, version in WANTED[name].items():
        if version and found[package].split("+")[0] != version:
            raise SystemExit(f"{name}: needs {package} {version}, but that interpreter has {found[package]}")


def test(python: Path, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Runs pytest and counts. The package is always this checkout's, not one that is installed in the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "junit.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", f"--junit-xml={report}", *arguments]
    begun = time.perf_counter()
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if not report.is_file():
        raise SystemExit(f"pytest ended with {code} and left no report")
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    count = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    bad = [
        case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [reason.get("message", "") for reason in suite.iter("skipped")]
    return {
        "passed": count["tests"] - count["failures"] - count["errors"] - count["skipped"],
        "skipped": count["skipped"],
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
        "why_skipped": {reason: skipped.count(reason) for reason in sorted(set(skipped))},
        "exit_code": code,
        "minutes": round((time.perf_counter() - begun) / 60, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WANTED, help="test only this environment")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="use this interpreter")
    parser.add_argument("--envs", type=Path, default=ROOT / ".versions", help="where environments are made")
    parser.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "results" / "versions.json")
    given, arguments = parser.parse_known_args()
    named = dict(pair.partition("=")[::2] for pair in given.python)
    if unknown := named.keys() - WANTED.keys():
        parser.error(f"--python {', '.join(unknown)}: choose from {', '.join(WANTED)}")

    results = json.loads(given.result.read_text()) if given.result.is_file() else {}
    for name in [given.only] if given.only else WANTED:
        python = Path(named[name]) if name in named else make(name, given.envs / name)
        found = packages(python)
        check(name, found)
        print(f"{name}: {', '.join(f'{p} {v}' for p, v in found.items())}", flush=True)
        part = " ".join(arguments) or "the whole suite except its slow tests"
        outcome = test(python, given.envs / f"{name}-report", arguments)
        results[name] = {"date": time.strftime("%Y-%m-%d"), "tests": part, "packages": found, **outcome}
        given.result.parent.mkdir(parents=True, exist_ok=True)
        given.result.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {outcome['passed']} passed, {outcome['skipped']} skipped, {len(outcome['failed'])} failed")
    return int(any(results[name]["exit_code"] for name in results))


if __name__ == "__main__":
    sys.exit(main())
