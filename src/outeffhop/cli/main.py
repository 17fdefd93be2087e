"""The command ``outeffhop``."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from outeffhop import __version__
from outeffhop._naming import did_you_mean
from outeffhop.cli import options
from outeffhop.cli.console import print_error

__all__ = ["main"]

# Command → its options, and the function that takes them: nothing heavy is imported before a command runs.
_COMMANDS: dict[str, tuple[type, str]] = {
    "train": (options.Train, "train:run"),
    "resume": (options.Resume, "train:resume"),
    "runs": (options.Runs, "runs:run"),
    "evaluate": (options.Evaluate, "evaluate:run"),
    "diagnose": (options.Diagnose, "diagnose:run"),
    "outliers": (options.Outliers, "outliers:run"),
    "quantize": (options.Quantize, "quantize:run"),
    "mend": (options.Mend, "mend:run"),
    "reproduce": (options.Reproduce, "reproduce:run"),
    "data": (options.Data, "listing:data"),
    "methods": (options.Methods, "listing:methods"),
    "presets": (options.Presets, "listing:presets"),
    "doctor": (options.Doctor, "doctor:run"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 output not read."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know α, a file name may not be UTF-8
    if not given:
        print(_overview(), file=sys.stderr)
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            _run(given)
    except (ValueError, ImportError) as error:
        print_error(error)
        return 2
    except BrokenPipeError:  # the reader has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return 141
    except (OSError, RuntimeError) as error:
        print_error(error)
        return 1
    except MemoryError as error:
        print_error(f"the memory does not suffice; a smaller --batch-size may help {error}".strip())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(given: list[str]) -> None:
    name, *rest = given
    if name in ("-h", "--help"):
        print(_overview())
        return
    if name == "--version":
        print(f"outeffhop {__version__}")
        return
    if name not in _COMMANDS:
        raise ValueError(f"command {name!r} is unknown{did_you_mean(name, _COMMANDS)} See outeffhop --help")
    kind, function = _COMMANDS[name]
    chosen = options.parse_train(rest) if name == "train" else options.parse(kind, name, rest)
    module, _, attribute = function.partition(":")
    getattr(import_module(f"outeffhop.cli.{module}"), attribute)(chosen)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print_error(f"warning: {message}")


def _overview() -> str:
    lines = [f"  {name:10}{(kind.__doc__ or '').splitlines()[0]}" for name, (kind, _) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: outeffhop COMMAND [--help] | outeffhop --version",
            "",
            "Transformers free of activation outliers. Example: outeffhop doctor",
            "",
            *lines,
            "",
            "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
