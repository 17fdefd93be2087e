"""Another process that loads checkpoints and runs them: with the library, or with transformers alone."""

from __future__ import annotations

import subprocess
import sys

import torch
from matrix_truth import main_output, no_cache


class Process:
    """Another process that loads checkpoints and runs them."""

    _CODE = """
import sys, torch, transformers
torch.set_num_threads(1)
if sys.argv[1] == "ours":
    from outeffhop.models import stanhop
for line in sys.stdin:
    folder = line.strip()
    kind, batch, key = torch.load(folder + "/batch.pt", weights_only=True)
    try:
        with torch.no_grad():
            out = (getattr(transformers, kind, None) or getattr(stanhop, kind)).from_pretrained(folder).eval()(**batch)
        out = out[key]
        assert sys.argv[1] == "ours" or "outeffhop" not in sys.modules
        torch.save(out, folder + "/out.pt")
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
"""

    def __init__(self, kind):
        pipe = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.worker = subprocess.Popen([sys.executable, "-c", self._CODE, kind], **pipe)

    def run(self, folder, model, batch):
        given = {**batch, **no_cache(model)}
        out = model(**given)
        torch.save((type(model).__name__, given, main_output(out)), f"{folder}/batch.pt")
        print(folder, file=self.worker.stdin, flush=True)
        answer = self.worker.stdout.readline().strip()
        if answer != "done":
            raise AssertionError(f"the other process says {answer!r}")
        return torch.load(f"{folder}/out.pt", weights_only=True)


_processes: dict[str, Process] = {}


def elsewhere(kind):
    return _processes.setdefault(kind, Process(kind)) if kind not in _processes else _processes[kind]
