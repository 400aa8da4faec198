"""pipert's functions never deadlock on a leaf that another thread's operation first uses."""

from __future__ import annotations

import pytest

from tests import scripts

SCRIPT = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(40, exit=True)
sys.setswitchinterval(1e-6)
import torch
from pipert.stage.gradients import delivery

def operations():
    gate.wait()
    for leaf in leaves:
        leaf * 2

ends = time.monotonic() + SECONDS
while time.monotonic() < ends:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(300)]
    gate = threading.Barrier(2)
    thread = threading.Thread(target=operations)
    thread.start()
    gate.wait()
    for leaf in reversed(leaves):
        delivery([(leaf, torch.ones(2))])
    thread.join()
print("nobody waits")
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, pytest.param(8, marks=pytest.mark.sweep)])
def test_gradients_are_delivered_while_another_thread_begins_to_use_their_leaves(
    seconds: int,
) -> None:
    done = scripts.run(f"SECONDS = {seconds}\n{SCRIPT}")
    assert done.stdout == "nobody waits\n", done.stderr
