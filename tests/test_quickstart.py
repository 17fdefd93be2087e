"""The page docs/quickstart.md is run, block after block, as a reader would: exit codes and output are as it says."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

PAGE = (Path(__file__).parent.parent / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"^```(\w+) ?(.*?)\n(.*?)^```$", PAGE, re.S | re.M)
NUMBER = re.compile(r"[+-]?\d[\d,]*\.?\d*(e[+-]?\d+)?")
ELSEWHERE = re.compile(r"\d (seconds|minutes|hours)")  # how long a run takes is the machine's affair


def lines(text):
    """Lines without their numbers, which differ from machine to machine, and without alignment."""
    return [" ".join(NUMBER.sub("#", ELSEWHERE.sub("0 time", line)).split()) for line in text.splitlines()]


def test_the_page_keeps_its_word(tmp_path):
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OUTEFFHOP_CACHE": str(tmp_path / ".cache"),
        "OMP_NUM_THREADS": "1",
    }
    walked = 0
    for (language, said, command), (following, _, shown) in pairwise([*BLOCKS, ("", "", "")]):
        if language != "sh" or said == "no-test":
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        printed = f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == int(said.removeprefix("exit=") or 0), printed
        assert "Traceback" not in done.stderr, printed
        assert following == "text", f"no output is shown of\n{command}"
        found = lines(done.stdout + done.stderr)
        for line in lines(shown):
            assert line in found or line == "…", f"{line!r} is not printed by\n{printed}"
        walked += 1
    assert walked == 9
    assert (tmp_path / "runs/a/report/outliers.html").is_file()


def test_it_names_every_command():
    from outeffhop.cli.main import _COMMANDS

    assert not [name for name in _COMMANDS if f"outeffhop {name}" not in PAGE]
