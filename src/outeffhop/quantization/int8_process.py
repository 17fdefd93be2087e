"""Starts the separate process that runs OpenVINO and NNCF, and talks to it.

OpenVINO's CPU plugin changes the signal stack of the thread that loads it and may leave a freed one behind: the next
Ctrl-C then ends the process with a segmentation fault. NNCF changes loggers, and both send telemetry. A user's process
that imports neither is not affected.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from typing import IO, Any

from outeffhop.quantization.int8_messages import read_message, write_message

__all__ = ["Worker", "check_installed"]


def check_installed(*packages: str) -> None:
    """Raises an ImportError that names the pip command if a package is missing; imports none."""
    for name in packages:
        if find_spec(name) is None:
            raise ImportError(f"int8 execution needs {name}: pip install 'outeffhop[int8]'", name=name)


class Worker:
    """Runs ``int8_worker`` until it is closed, collected, or this process ends, however that happens."""

    def __init__(self) -> None:
        # its own process group: Ctrl-C goes to this process, which then closes the other
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outeffhop.quantization.int8_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,
        )
        self._requests: IO[bytes] = self.process.stdin  # type: ignore[assignment]
        self._answers: IO[bytes] = self.process.stdout  # type: ignore[assignment]
        self._end = weakref.finalize(self, _end, self.process)
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def ask(self, command: str, **arguments: Any) -> Any:
        """What a command of ``int8_worker`` returns.

        Raises:
            ValueError: the command raised one.
            RuntimeError: the command raised another error, or the process died.
        """
        try:
            with self._lock:
                write_message(self._requests, [command, arguments])
                error, answer = read_message(self._answers)
        except (EOFError, BrokenPipeError) as end:
            self.close()
            raise RuntimeError(f"the process that runs OpenVINO ended with {_status(self.process)}") from end
        except BaseException:  # Ctrl-C: half a message may be in the pipes
            self.close()
            raise
        if error is not None:
            raise (ValueError if error == "ValueError" else RuntimeError)(answer)
        return answer

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=10)  # closes its standard input, on which it ends
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _status(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"
