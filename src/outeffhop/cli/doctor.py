"""``outeffhop doctor``: versions, devices, and which attention backends serve, by trying each."""

from __future__ import annotations

import math
import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from outeffhop import __version__
from outeffhop.cli.console import print_json, print_table
from outeffhop.cli.options import Doctor
from outeffhop.functional import entmax
from outeffhop.ops import attention, entmax_gpu, explain
from outeffhop.ops.call import prepare
from outeffhop.ops.dispatch import BACKENDS
from outeffhop.ops.eager import eager_attention

__all__ = ["examine", "run"]

_PACKAGES = (
    *("torch", "triton", "transformers", "safetensors", "entmax", "adasplash"),
    *("numpy", "accelerate", "datasets", "openvino"),
)


def examine() -> dict[str, Any]:
    devices = {"cpu": platform.processor() or platform.machine()}
    for i in range(torch.cuda.device_count()):
        devices[f"cuda:{i}"] = torch.cuda.get_device_name(i)
    for kind in ("mps", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            devices[kind] = kind
    dtypes = {device: torch.float32 if device == "cpu" else torch.bfloat16 for device in devices}
    return {
        "outeffhop": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": devices,
        "threads": torch.get_num_threads(),
        "attention": {device: _backends(device, dtype) for device, dtype in dtypes.items()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backends(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """For a plain call on this device: the choice of "auto", and of each backend whether it serves and how exactly."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 100, 64, generator=generator).to(device, dtype) for _ in range(3))
    truth = attention(query.double(), key.double(), value.double(), backend="eager")
    explanation = explain(query, key, value)
    found: dict[str, Any] = {"dtype": str(dtype), "auto": explanation.chosen, "backends": {}}
    for name in BACKENDS:
        why, error = explanation.reasons[name], None
        if why is None:
            try:
                out = attention(query, key, value, backend=name)
                error = float((out.double() - truth).abs().max())  # type: ignore[union-attr,operator]
            except Exception as failure:  # the report must go on, whatever a driver throws
                why = f"failed: {failure}"
        found["backends"][name] = {"serves": why is None, "why_not": why, "largest_error": error}
    found["backends"]["adasplash"] = _entmax(query, key, value)
    return found


def _entmax(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """The kernels of the methods sparse and gsh, which compute other weights than the backends above."""
    call = prepare(query, key, value, None, 0.0, False, None, False, -math.inf, False)
    why, error = entmax_gpu.why_not(call, 1.5), None
    if why is None:
        try:
            truth, _ = eager_attention(query.double(), key.double(), value.double(), partial(entmax, alpha=1.5))
            error = float((entmax_gpu.attend(call, 1.5).double() - truth).abs().max())
        except Exception as failure:
            why = f"failed: {failure}"
    return {"serves": why is None, "why_not": why, "largest_error": error}


def run(options: Doctor) -> None:
    report = examine()
    if options.json:
        print_json(report)
        return
    versions = {"outeffhop": report["outeffhop"], "python": report["python"], **report["packages"]}
    print_table("Versions", ("package", "version"), [(k, v or "not installed") for k, v in versions.items()])
    print_table("Devices", ("device", "name"), list(report["devices"].items()))
    for device, found in report["attention"].items():
        rows = [
            (name, "chosen" if name == found["auto"] else "serves", f"largest error {b['largest_error']:.1e}")
            if b["serves"]
            else (name, "no", b["why_not"])
            for name, b in found["backends"].items()
        ]
        print_table(f"Attention backends on {device}, {found['dtype']}", ("backend", "", ""), rows)
