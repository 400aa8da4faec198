"""Tests the process that forks the tests' scripts."""

from __future__ import annotations

import os
import signal

import pytest

from tests.scripts import run

FORKING = """
import os, time
from tests.scripts import run

assert run("print(7)").stdout == "7\\n"
pid = os.fork()
if pid == 0:
    for descriptor in range(3):
        os.close(descriptor)
    time.sleep(60)
    os._exit(0)
print(pid)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_server_ends_even_if_a_child_of_the_tests_has_its_stdin() -> None:
    """A worker of a data loader, say: the end of a file is not seen until each copy is closed."""
    ended = run(FORKING, fresh=True)
    os.kill(int(ended.stdout), signal.SIGKILL)
    assert (ended.returncode, ended.stderr) == (0, "")
