"""Runs scripts in processes of their own, in which torch is already imported.

Importing torch takes a second or two, most of the time of such a test, and the first pipe of a
process takes a tenth of a second. So one server process has imported torch and made a pipe, but has
started no thread and computed nothing. Each script runs in a fork of it as ``__main__``. Afterwards
the interpreter ends as it does after ``python -c``: threads are joined, functions of ``atexit``
called, modules torn down. Only the destructors of torch's libraries, which take longer than most
scripts, are left out. A script that tests the end of a process asks for its ``whole_end``. A script
that tests imports, or the end of an interpreter started for it, asks for a ``fresh`` interpreter,
whose end is whole too. Each raises ``KeyboardInterrupt`` at SIGINT, which a background job, and all
that it starts, would ignore.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["run"]

ROOT = Path(__file__).parents[2]
SECONDS = 50.0  # shorter than pytest's time limit, which would end the whole run

NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"  # torch works without NumPy
PYTHON = [sys.executable, "-W", "error", "-W", NO_NUMPY, "-c"]

FRESH = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

first = ""
"""A line that each script begins with, unless it is fresh."""

SERVER = """
import ctypes, gc, json, os, signal, sys, threading
import torch, pipert
import torch.fx.experimental.symbolic_shapes  # a first backward from a gradient imports it

libc = ctypes.CDLL(None)

def next_script():
    '''Returns each requested script, in a fork; the server ends at the end of its stdin.'''
    pipert.Pipe(torch.nn.Sequential(torch.nn.Identity()), [1], devices=["cpu"]).close()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # or a fork would collect it once more when it ends
    for request in sys.stdin:
        asked = json.loads(request)
        pid = os.fork()
        if pid == 0:
            for descriptor, name in enumerate([os.devnull, asked["stdout"], asked["stderr"]]):
                file = os.open(name, os.O_RDWR)
                os.dup2(file, descriptor)
                os.close(file)
            sys.stdin = open(0, closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not asked["whole_end"]:
                libc.on_exit(libc._exit, None)  # runs before the exit handlers of libraries
            return asked["script"]
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)

exec(compile(next_script(), "<string>", "exec"))
"""


def run(
    script: str, fresh: bool = False, whole_end: bool = False, seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs a script; warnings are errors.

    Args:
        script: Python code, including its imports.
        fresh: whether to run it in a new interpreter, which has imported nothing.
        whole_end: whether the process ends as after ``python -c``, including destructors.
        seconds: after which a fresh interpreter is killed; the test needs a longer limit, too.

    Raises:
        subprocess.TimeoutExpired: the script took too long and was killed.
    """
    script = script if fresh else first + script
    if fresh or not hasattr(os, "fork") or not os.path.exists("/proc/self/task"):
        return subprocess.run(
            [*PYTHON, FRESH + script], cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        stdout.touch()
        stderr.touch()
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        asked = {
            "script": script, "whole_end": whole_end,
            "stdout": str(stdout), "stderr": str(stderr),
        }  # fmt: skip
        server.stdin.write(json.dumps(asked).encode() + b"\n")
        pid = _answer(server)
        late = not select.select([server.stdout], [], [], SECONDS)[0]
        if late:
            os.kill(pid, signal.SIGKILL)
        code = _answer(server)
        texts = stdout.read_text(), stderr.read_text()
    if late:
        raise subprocess.TimeoutExpired(script, SECONDS, *texts)
    return subprocess.CompletedProcess(script, code, *texts)


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [*PYTHON, SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[bytes]) -> None:
    """Kills the server: a process forked by a test may hold its stdin open forever."""
    server.kill()
    server.communicate()


def _answer(server: subprocess.Popen[bytes]) -> int:
    assert server.stdout is not None
    return int(server.stdout.readline())
