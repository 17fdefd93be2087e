"""Results as files: JSON that any reader takes, written so that no moment finds it half done."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from typing import Any

__all__ = ["to_plain", "from_plain", "write_whole"]


def to_plain(value: Any) -> Any:
    """The same with "nan", "inf" and "-inf" for the numbers that JSON does not know, and lists for tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value


def from_plain(value: Any) -> Any:
    """The inverse, but for tuples, which stay lists."""
    if isinstance(value, dict):
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file at once, or leaves it as it is; makes its folder."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, since os.replace is atomic within one file system alone
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
