"""Commands in processes of their own, that can be killed or find their disk full.

A server imports everything once; each request is answered by a fork of it, before torch has any threads:

    with Server() as server:
        codes, said = server.run(["tmpfs", folder, "600k"], ["command", "train", ...])

A fork sees mounts of its own, which end with it: what they hold has to be copied out of it. ``run(..., after=0.3)``
kills it from outside at that second.
"""

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_RDONLY, _BIND, _REMOUNT, _REC, _PRIVATE = 1, 4096, 32, 16384, 1 << 18


IMPORTED = (
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "outeffhop.cli.diagnose",
    "outeffhop.cli.evaluate",
    "outeffhop.cli.mend",
    "outeffhop.cli.outliers",
    "outeffhop.cli.quantize",
    "outeffhop.cli.reproduce",
    "outeffhop.cli.train",
    "outeffhop.lab.paper.energy_landscape",
    "outeffhop.lab.report.experiments_page",
)


class Server:
    def __enter__(self):
        paths = [str(Path(__file__).parent), *sys.path]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        command = [sys.executable, "-c", "import faults; faults.serve()"]
        self.process = subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True)
        return self

    def __exit__(self, *_):
        self.process.communicate()

    def run(self, *steps, after=None):
        """The exit codes of the commands, −9 at the end where something killed, and what was printed.

        Args:
            after: seconds until it is killed, if it has not ended by itself.
        """
        with tempfile.TemporaryDirectory() as place:
            json.dump({"after": after, "steps": steps, "place": place}, self.process.stdin, default=str)
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            killed, self.seconds = json.loads(self.process.stdout.readline())
            said = Path(place, "said").read_text()
            assert killed in (0, -signal.SIGKILL), said
            codes = [int(code) for code in Path(place, "codes").read_text().split()]
            return codes + ([killed] if killed else []), said


def serve():
    """Answers requests, one a line, until there are no more."""
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED:
        import_module(name)

    for line in sys.stdin:
        request = json.loads(line)
        after, begin = request.pop("after"), time.monotonic()
        child = os.fork()
        if child == 0:
            _answer(**request)
        if after is not None:
            ended = os.pidfd_open(child)
            if not select.select([ended], [], [], after)[0]:
                os.kill(child, signal.SIGKILL)
            os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([status, time.monotonic() - begin]), flush=True)


def _answer(steps, place):
    said = os.open(Path(place, "said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    codes = open(Path(place, "codes"), "a", buffering=1)  # noqa: SIM115, closed with the process
    try:
        for name, *given in steps:
            code = STEPS[name](*given)
            if name in ("command", "load", "at once"):
                print(code, file=codes)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# Steps


def command(*arguments):
    from outeffhop.cli.main import main

    code = main([str(a) for a in arguments])
    sys.stdout.flush()
    return code


def environ(name, value):
    os.environ[name] = value


def at_once(*commands):
    """Each in a process of its own, all begun together; their exit codes."""
    children = []
    for arguments in commands:
        child = os.fork()
        if child == 0:
            try:
                os._exit(command(*arguments))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        children.append(child)
    return " ".join(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def tmpfs(folder, size):
    """A disk of so many bytes."""
    _own_mounts()
    _mount(b"tmpfs", folder, b"tmpfs", 0, f"size={size}".encode())


def read_only(folder):
    _own_mounts()
    _mount(os.fsencode(folder), folder, None, _BIND, None)
    _mount(None, folder, None, _BIND | _REMOUNT | _RDONLY, None)


def memory(more):
    """Leaves so many bytes of memory beyond what the process has."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (has + more, has + more))


def load(checkpoint):
    """As a command would end that loads a checkpoint."""
    from outeffhop.models.checkpoint import load_checkpoint

    try:
        load_checkpoint(checkpoint)
    except ValueError as error:
        print(error)
        return 2
    return 0


def write(path, text):
    Path(path).write_text(text)


def fill(folder, leave=0):
    """Leaves so many bytes on the disk."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with open(Path(folder, ".filling"), "wb") as file:
        file.write(b"\0" * max(0, free - leave))


def make_room(folder):
    Path(folder, ".filling").unlink()


def print_to(path):
    os.dup2(os.open(path, os.O_WRONLY), 1)


def copy(source, target):
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".filling"), dirs_exist_ok=True)


def trap(moment, count):
    """Kills this process at the count-th file written whole: half of it written, before its renaming, or after."""
    from outeffhop import _io

    calls = iter(range(1, count + 1))
    name = {"half": "fsync", "rename": "replace", "renamed": "replace"}[moment]
    original = getattr(os, name)

    def called(*args):
        due = next(calls, None) == count
        if due and moment == "half":
            os.truncate(f"/proc/self/fd/{args[0]}", os.fstat(args[0]).st_size // 2)
        elif due and moment == "renamed":
            original(*args)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    class Trapped:
        """``os`` as that module sees it."""

        def __getattr__(self, attribute):
            return called if attribute == name else getattr(os, attribute)

    _io.os = Trapped()


STEPS = {
    "command": command,
    "at once": at_once,
    "go to": os.chdir,
    "environ": environ,
    "tmpfs": tmpfs,
    "read-only": read_only,
    "fill": fill,
    "make room": make_room,
    "copy": copy,
    "print to": print_to,
    "trap": trap,
    "memory": memory,
    "write": write,
    "load": load,
}


# Mounts that no other process sees


def mounts_are_allowed():
    """Tried in a process of its own."""
    code = "import faults, sys; faults.tmpfs(sys.argv[1], '4k')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder]
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def _own_mounts():
    if getattr(_own_mounts, "done", False):
        return
    _own_mounts.done = True
    user, group = os.geteuid(), os.getegid()
    _check(_libc().unshare(_NEWNS if user == 0 else _NEWNS | _NEWUSER))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount(b"none", "/", None, _REC | _PRIVATE, None)


def _mount(source, target, kind, flags, options):
    _check(_libc().mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), options))


def _check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _libc():
    return ctypes.CDLL(None, use_errno=True)
