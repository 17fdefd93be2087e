"""The command ``outeffhop``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from outeffhop.cli.console import print_error

__all__ = ["main"]


def doctor(json: bool = False) -> None:
    """What is installed here, and which attention backends serve. Example: outeffhop doctor --json

    Args:
        json: print JSON instead of tables.
    """
    from outeffhop.cli.doctor import examine, show

    show(examine(), as_json=json)


def methods(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[METHOD]")] = None, json: bool = False
) -> None:
    """The attention methods and their parameters. Example: outeffhop methods 'outeffhop(n=4)'

    Args:
        name: a method with or without parameters, to see it in full; all of them if left out.
        json: print JSON instead of a table.
    """
    from outeffhop.cli.methods import show

    show(name, as_json=json)


def presets(json: bool = False) -> None:
    """The models and sizes there are; the paper's parameter counts beside ours. Example: outeffhop presets

    Args:
        json: print JSON instead of tables.
    """
    from outeffhop.cli.presets import show

    show(as_json=json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"doctor": doctor, "methods": methods, "presets": presets},
            prog="outeffhop",
            description="Transformers free of activation outliers. Start with: outeffhop doctor",
            args=arguments,
        )
    except ValueError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
