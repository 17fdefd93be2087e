"""What the README shows is what its code prints, and the commands it names exist."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_prints_what_is_shown():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == shown


def test_its_commands_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\S+)", README, re.M)
    assert commands == ["demo", "test"]
    assert all(re.search(rf"^{command}:", makefile, re.M) for command in commands)


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
