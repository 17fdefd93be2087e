"""Mutation testing: how many of the faults injected into the source do its tests notice?

    make mutation                                    # continues where it stopped
    python tools/mutation.py --seed 2 --each 60      # another sample
    python tools/mutation.py --again                 # the survivors of the sample once more, after new tests

cosmic-ray makes the mutants: at each of EACH random places of a package, one of its operators, drawn at random. Left
out are types, what is inside a `raise`, and Triton kernels, which need a GPU. A mutant is a copy of the source. It
meets the tests of its package (TESTS) that run the changed line, the quickest first, until one fails. If no test runs
that line in its own process (but at import, compiled or in a subprocess), it meets those that run its module, or all.
A mutant that hangs is noticed, too.

FILE keeps every mutant: "first" is what the tests said when it was drawn, "outcome" what they say now. Read the
survivors. One that no input can tell from the original has the outcome "equivalent", one that only a GPU tells from it
has the outcome "elsewhere", both with a "reason", written into FILE by hand; these two do not count in the score.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
sys.dont_write_bytecode = True  # Python compares sources with their bytecode to the second only

import coverage  # noqa: E402
import pytest  # noqa: E402
from cosmic_ray.ast import ast_nodes, get_ast  # noqa: E402
from cosmic_ray.mutating import mutate_code  # noqa: E402
from cosmic_ray.plugins import get_operator, operator_names  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
WORK = ROOT / "build" / "mutation"
TESTS = {
    "ops": ["tests/ops", "tests/hardening/test_fuzz_attention.py"],
    "models": [
        "tests/models",
        "tests/hardening/test_fuzz_checkpoints.py",
        "tests/hardening/test_hostile_sizes.py",
        "tests/hardening/test_security.py",
    ],
    "quantization": [
        "tests/quantization",
        "tests/hardening/test_fuzz_quantizers.py",
        "tests/hardening/test_fuzz_reports.py",
    ],
    "outliers": ["tests/outliers", "tests/hardening/test_fuzz_quantizers.py", "tests/hardening/test_fuzz_reports.py"],
}
OPERATORS = [name for name in operator_names() if not get_operator(name).arguments()]
Place = tuple[int, int]  # line, column


class Chosen:
    """A plugin of pytest: only these tests, in this order; it keeps what each took and the first that failed."""

    def __init__(self, tests: list[str] | None) -> None:
        self.rank = None if tests is None else {test: i for i, test in enumerate(tests)}
        self.seconds: Counter[str] = Counter()
        self.failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.rank is not None:
            items[:] = sorted((i for i in items if i.nodeid in self.rank), key=lambda i: self.rank[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class Run:
    """pytest in a fork of this process, which has torch loaded already, on the copy of the source in `folder`."""

    def __init__(self, folder: Path, paths: list[str], tests: list[str] | None, limit: float, *options: str) -> None:
        self.folder, self.deadline, self.begun = folder, time.monotonic() + limit, time.monotonic()
        self.answer = folder / "answer.json"
        self.answer.unlink(missing_ok=True)
        self.process = multiprocessing.get_context("fork").Process(target=self._tests, args=(paths, tests, options))
        self.process.start()

    def _tests(self, paths: list[str], tests: list[str] | None, options: tuple[str, ...]) -> None:
        os.setsid()  # so that it can be ended together with the processes that tests start
        out = os.open(self.folder / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(ROOT)
        sys.path[:0] = [str(self.folder / "src"), str(ROOT)]  # tests import each other as `python -m pytest` lets them
        os.environ |= {"PYTHONPATH": str(self.folder / "src"), "COVERAGE_FILE": str(self.folder / "coverage")}
        chosen = Chosen(tests)
        code = pytest.main([*paths, "-p", "no:cacheprovider", *options], [chosen])
        self.answer.write_text(json.dumps({"code": int(code), "by": chosen.failed, "seconds": chosen.seconds}))

    def done(self) -> bool:
        if not self.process.is_alive():
            return True
        if time.monotonic() < self.deadline:
            return False
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        return True

    def result(self) -> dict[str, Any]:
        found = {"code": -1, "by": "it hangs" if time.monotonic() >= self.deadline else "it ends the process"}
        return json.loads(self.answer.read_text()) if self.answer.is_file() else found


def copy(name: str) -> Path:
    """A fresh copy of the source in a folder of that name."""
    folder = WORK / name
    shutil.rmtree(folder / "src", ignore_errors=True)
    shutil.copytree(SRC, folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]


def baseline(package: str) -> tuple[dict[str, float], coverage.CoverageData]:
    """What each test of a package takes without a mutation, where it must pass, and which lines it runs."""
    folder = WORK / package
    file = folder / "baseline.json"
    known = json.loads(file.read_text()) if file.is_file() else {"source": None, "files": {}, "seconds": {}}
    source = digest(SRC.rglob("*.py"))
    if known["source"] != source:
        known = {"source": source, "files": {}, "seconds": {}}
        (folder / "coverage").unlink(missing_ok=True)
    paths = [p for given in TESTS[package] for p in sorted((ROOT / given).rglob("test_*.py")) or [ROOT / given]]
    now = {str(path.relative_to(ROOT)): digest([path]) for path in paths}
    if changed := [name for name in now if known["files"].get(name) != now[name]]:
        print(f"{package}: tests without a mutation, of {len(changed)} files", flush=True)
        copy(package)
        measured = (
            f"--cov={folder / 'src' / 'outeffhop'} --cov-append --cov-context=test --cov-report= --cov-config=/dev/null"
        )
        run = Run(folder, changed, None, 3600, *measured.split())
        while not run.done():
            time.sleep(1)
        if (found := run.result())["code"] != 0:
            raise SystemExit(f"{package}: {found['by']} fails without a mutation; see {folder / 'log'}")
        kept = {test: took for test, took in known["seconds"].items() if test.partition("::")[0] not in changed}
        known |= {"files": now, "seconds": kept | found["seconds"]}
        file.write_text(json.dumps(known))
    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    return known["seconds"], data


def tests_of(entry: dict[str, Any], seconds: dict[str, float], data: coverage.CoverageData) -> list[str]:
    """The tests that run the line of a mutant, or else its module, or else all; the quickest first."""
    lines = data.contexts_by_lineno(str(WORK / entry["package"] / "src" / entry["module"]))
    functions = (n for n in ast.walk(ast.parse((SRC / entry["module"]).read_text())) if isinstance(n, ast.FunctionDef))
    called = any(f.body[0].lineno <= entry["line"] <= f.end_lineno for f in functions)  # and not run by an import
    for contexts in (lines.get(entry["line"], []) if called else [], {c for line in lines.values() for c in line}):
        if found := {context.rpartition("|")[0] for context in contexts} & seconds.keys():
            return sorted(found, key=lambda test: seconds[test])
    return sorted(seconds, key=lambda test: seconds[test])


def left_out(code: str) -> list[tuple[Place, Place]]:
    """Where a mutation changes no behaviour, or a message only: types and what is inside a `raise`."""
    found: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Raise() | ast.BinOp(op=ast.BitOr(), right=ast.Constant(value=None)):  # such as Tensor | None
                found.append(node)
            case ast.AnnAssign() | ast.arg():
                found.append(node.annotation)
            case ast.FunctionDef():
                found.append(node.returns)
    lines = code.splitlines()

    def place(line: int, column: int) -> Place:  # ast counts bytes, parso characters
        return line, len(lines[line - 1].encode()[:column].decode())

    spans = [node for node in found if node is not None]
    return [(place(n.lineno, n.col_offset), place(n.end_lineno, n.end_col_offset)) for n in spans]  # type: ignore


def mutations(code: str) -> dict[Place, list[tuple[str, int]]]:
    """Every mutation of a module, by its place: operators, and which of the operator's it is."""
    found: dict[Place, list[tuple[str, int]]] = {}
    nodes, without = list(ast_nodes(get_ast(code))), left_out(code)
    for name in OPERATORS:
        operator = get_operator(name)()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for i, start in enumerate(places):
            if not any(begin <= start < end for begin, end in without):
                found.setdefault(start, []).append((name, i))
    return found


def mutant(code: str, operator: str, occurrence: int) -> tuple[str, str, str] | None:
    """The mutated module with the lines that changed, before and after; None if it is not Python."""
    mutated = mutate_code(code, get_operator(operator)(), occurrence)
    try:
        compile(mutated, "mutant", "exec")
    except SyntaxError:
        return None
    old, new = code.splitlines(), mutated.splitlines()
    first = next(i for i in range(len(old)) if i >= len(new) or old[i] != new[i])
    last = next(i for i in range(len(old)) if old[-1 - i] != new[-1 - i])
    changed = [" ".join(" ".join(lines[first : len(lines) - last]).split()) for lines in (old, new)]
    return mutated, changed[0], changed[1]


def sample(package: str, each: int, seed: int) -> list[dict[str, Any]]:
    """Mutants at `each` random places of a package."""
    draw = random.Random(f"{package} {seed}")
    modules = sorted(p for p in (SRC / "outeffhop" / package).rglob("*.py") if not p.stem.endswith("_triton"))
    places = [(m, at, kinds) for m in modules for at, kinds in sorted(mutations(m.read_text()).items())]
    entries: list[dict[str, Any]] = []
    for module, at, kinds in draw.sample(places, len(places)):
        operator, occurrence = draw.choice(kinds)
        if len(entries) < each and (made := mutant(module.read_text(), operator, occurrence)):
            entries.append({
                "package": package, "module": str(module.relative_to(SRC)), "line": at[0],
                "operator": operator.removeprefix("core/"), "before": made[1], "after": made[2],
            })  # fmt: skip
    return entries


def apply(entry: dict[str, Any], folder: Path) -> bool:
    """Makes the mutant in a copy; False if the source has changed so that there is no such mutant any more."""
    code = (SRC / entry["module"]).read_text()
    places = sorted(mutations(code).items(), key=lambda item: abs(item[0][0] - entry["line"]))
    for at, kinds in places:
        for operator, occurrence in kinds:
            if operator == "core/" + entry["operator"]:
                made = mutant(code, operator, occurrence)
                if made and made[1:] == (entry["before"], entry["after"]):
                    entry["line"] = at[0]
                    (folder / "src" / entry["module"]).write_text(made[0])
                    return True
    return False


def score(entries: list[dict[str, Any]], key: str) -> dict[str, Any]:
    count = Counter(
        entry[key] if entry["outcome"] in ("noticed", "survived") else entry["outcome"] for entry in entries
    )
    judged = count["noticed"] + count["survived"]
    return {**count, "score": round(100 * count["noticed"] / judged, 1) if judged else None}


def save(file: Path, samples: dict[str, Any]) -> None:
    for found in samples.values():
        tested = [entry for entry in found["mutants"] if "outcome" in entry]
        of = {name: [e for e in tested if e["package"] == name] for name in TESTS} | {"all": tested}
        for key in ("first", "outcome"):
            found["score, " + {"first": "at first", "outcome": "now"}[key]] = {
                name: score(entries, key) for name, entries in of.items()
            }
    text = json.dumps(samples, indent=1, ensure_ascii=False) + "\n"
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="which sample (default: %(default)s)")
    parser.add_argument("--each", type=int, default=50, help="mutants of each package (default: %(default)s)")
    parser.add_argument("--packages", nargs="+", choices=TESTS, default=list(TESTS), help="only these")
    parser.add_argument("--again", action="store_true", help="test the survivors again")
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--file", type=Path, default=ROOT / "benchmarks" / "results" / "mutation.json")
    given = parser.parse_args()

    import torch
    import transformers.modeling_utils  # noqa: F401  # loaded once: every mutant's process is a fork of this one

    samples = json.loads(given.file.read_text()) if given.file.is_file() else {}
    if str(given.seed) not in samples:
        drawn = [entry for package in TESTS for entry in sample(package, given.each, given.seed)]
        samples[str(given.seed)] = {"places per package": given.each, "torch": torch.__version__, "mutants": drawn}
    entries = [e for e in samples[str(given.seed)]["mutants"] if e["package"] in given.packages]
    waiting = [e for e in entries if "outcome" not in e or (given.again and e["outcome"] == "survived")]
    before = {package: baseline(package) for package in {e["package"] for e in waiting}}
    free = [copy(f"{given.file.stem}-{i}") for i in range(given.workers)]
    running: list[tuple[Run, dict[str, Any]]] = []

    total, done = len(waiting), 0
    while waiting or running:
        while waiting and free:
            entry = waiting.pop(0)
            folder = free.pop()
            if not apply(entry, folder):
                entry["outcome"] = "gone"
                free.append(folder)
                continue
            tests = tests_of(entry, *before[entry["package"]])
            paths = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            limit = 120 + 5 * sum(before[entry["package"]][0][test] for test in tests)
            running.append((Run(folder, paths, tests, limit, "-x", "-q"), entry))
        for run, entry in [pair for pair in running if pair[0].done()]:
            running.remove((run, entry))
            found = run.result()
            shutil.copy2(SRC / entry["module"], run.folder / "src" / entry["module"])
            free.append(run.folder)
            entry["outcome"] = "survived" if found["code"] in (0, 5) else "noticed"
            entry.setdefault("first", entry["outcome"])
            entry["by"] = (found["by"] or "it cannot be imported") if found["code"] else None
            done += 1
            took = time.monotonic() - run.begun
            print(f"{done} of {total}, {took:.0f} s: {entry['outcome']} {entry['module']}:{entry['line']}", flush=True)
            save(given.file, samples)
        time.sleep(0.1)
    save(given.file, samples)
    for name, found in samples[str(given.seed)]["score, now"].items():
        print(name, found)


if __name__ == "__main__":
    main()
