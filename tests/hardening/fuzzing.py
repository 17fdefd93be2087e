"""What the fuzz tests share: how many cases, how bytes are damaged, and what counts as a proper refusal.

OUTEFFHOP_FUZZ=20 tries twenty times as many cases as a plain run of the tests does.
"""

import contextlib
import io
import os
import warnings

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from outeffhop.cli.main import main

TIMES = int(os.environ.get("OUTEFFHOP_FUZZ", "1"))

# What the documentation of this package promises. Subclasses such as UnicodeDecodeError or JSONDecodeError
# come from somewhere deep inside, and do not say which file is meant.
DOCUMENTED = (ValueError, TypeError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, OSError)


def cases(number):
    """Settings for a test that tries so many cases, times OUTEFFHOP_FUZZ."""
    # files in one folder for all cases of a test: each case writes what it reads
    unneeded = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=number * TIMES, deadline=None, suppress_health_check=unneeded)


def outcome(call, *names):
    """What the call returns, or the error it refused with; an error of any other kind fails the test.

    ``names``: one of them must be in the message, such as the file's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except DOCUMENTED as error:
        if type(error) not in DOCUMENTED:
            raise
        found = error
    assert not names or any(name in str(found) for name in names), f"{found!r} names none of {names}"
    return found


def refused(found):
    return isinstance(found, Exception)


def command(*arguments):
    """Exit code, stdout and stderr of the command line; an error that gets past it fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as error:  # how the parser ends: usage, or help
            code = error.code or 0
    assert code in (0, 1, 2), f"exit code {code}"
    assert "Traceback" not in out.getvalue() + err.getvalue()
    return code, out.getvalue(), err.getvalue()


def one_line(err, *names):
    """Whether stderr is one line of ours (warnings aside) that names what is wrong."""
    lines = [line for line in err.splitlines() if not line.startswith("outeffhop: warning: ")]
    said = [line for line in lines if line.startswith("outeffhop: ")]
    assert lines == said, err
    assert len(said) == 1, err
    assert any(name in said[0] for name in names), f"{said[0]!r} names none of {names}"


@st.composite
def damaged(draw, content):
    """Bytes made of ``content``: cut short, bits flipped, pieces overwritten, put in, taken out or repeated."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(("flip", "cut", "overwrite", "insert", "remove", "repeat")))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "overwrite":
            piece = draw(st.binary(min_size=1, max_size=16))
            data[at : at + len(piece)] = piece
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16) | st.sampled_from((b"[" * 5000, b"9" * 5000, b"{}")))
        else:
            end = min(len(data), at + draw(st.integers(1, 64)))
            data[at:end] = b"" if kind == "remove" else bytes(data[at:end]) * 2
    return bytes(data)


def bytes_like(content):
    """Damaged content, or bytes that never were any."""
    return damaged(content) | st.binary(max_size=200)
