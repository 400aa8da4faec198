"""Where torch lacks the dispatch key, tasks that might draw take turns, and a warning says so."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import threading, warnings
    import torch, torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    from pipert import Pipe, _torch, pipeline
    from tests.layers import Apply

    parse_key = _torch.parse_key

    def parse(name):
        if name == "TESTING_ONLY_GenericMode":
            raise RuntimeError("could not parse dispatch key")
        return parse_key(name)

    _torch.parse_key = parse
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*use_reentrant.*")

    def made(*layers):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pipe = Pipe(nn.Sequential(*layers), [1] * len(layers), devices=["cpu"] * len(layers),
                        chunks=4, checkpoint=mode)
        told.extend(str(warning.message) for warning in seen)
        return pipe

    told = []
    state = torch.get_rng_state
"""

BODY = """
    running = [0, 0]
    lock = threading.Lock()

    def alone(x):
        with lock:
            running[0] += 1
            running[1] = max(running)
        y = F.dropout(x)
        with lock:
            running[0] -= 1
        return y

    def again(x):
        return checkpoint(F.dropout, x, use_reentrant=False)

    inner = made(nn.Dropout(), nn.Dropout())
    nested = Apply(lambda x: F.dropout(inner(F.dropout(x))))
    layers = Apply(alone), Apply(again), nested, nn.Dropout()
    results = []
    for schedule in (None, None, "1f1b", "1f1b"):
        with made(*layers) as pipe:
            x = torch.ones(8, 64, requires_grad=True)
            torch.manual_seed(0)
            if schedule is None:
                y = pipe(x)
                y.sum().backward()
            else:
                _, y = pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), schedule=schedule,
                                             reduction="sum", return_outputs=True)
            assert torch.equal(x.grad, y), schedule
            results.append((y.detach(), bytes(state().tolist())))
    inner.close()
    for y, after in results[1:]:
        assert torch.equal(y, results[0][0]) and after == results[0][1]
    assert running[1] == 1
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    assert results[0][1] == bytes(state().tolist())
    assert len(told) == 1 and "wait for each other" in told[0], told
    print("right")
"""


@pytest.mark.parametrize("mode", ["always", "never"])
def test_random_numbers_are_right_without_the_key(mode: str) -> None:
    script = textwrap.dedent(SCRIPT) + f"mode = {mode!r}\n" + textwrap.dedent(BODY)
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert found.stdout == "right\n", found.stderr
