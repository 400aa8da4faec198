"""Tests what happens where torch lacks a private name that pipert uses (guarantee V1)."""

from __future__ import annotations

import json

import pytest
import torch

from pipert import _torch
from tests.helpers import scripts
from tests.repository.test_architecture import FILES, imports_of

SCRIPT = '''
import builtins, json, os, sys, warnings
import torch
from torch import nn

def hide(name):
    """Hide an attribute from pipert/_torch.py alone: torch needs its own names."""
    look_up = builtins.getattr

    def without(owner, key, *default):
        if key == name and sys._getframe(1).f_code.co_filename.endswith("_torch.py"):
            if default:
                return default[0]
            raise AttributeError(name)
        return look_up(owner, key, *default)

    builtins.getattr = without

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def take_steps(pipe, x):
    with pipe:
        pipe.forward_backward(x, loss_fn=lambda y, _: y.float().square().mean())
        pipe(x).float().square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in pipe.parameters())

def run():
    import pipert
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    settings = dict(devices=["cpu", "cpu"], chunks=2, checkpoint="always")
    take_steps(pipert.Pipe(two, [1, 1], **settings), torch.ones(4, 2))
    take_steps(pipert.pipeline(GPT(), ["blocks.1"], **settings), torch.arange(8).view(4, 2))
    return "right"

torch.set_num_threads(1)
run_of = {}
for path in NAMES:
    read, write = os.pipe()
    if not os.fork():
        hide(path.rpartition(".")[2].rpartition(":")[2])
        try:
            found = run()
        except BaseException as error:
            found = repr(error)
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        run_of[path] = json.loads(pipe.read() or "0")
    os.wait()
print(json.dumps(run_of))
'''


LONG = 500.0  # s: a process for each of a dozen names, on a machine that may be busy


def results_without(names: list[str]) -> dict[str, str]:
    """Makes two pipes and takes steps with them, once without each of the names."""
    done = scripts.run(f"NAMES = {names}\n{SCRIPT}", fresh=True, seconds=LONG)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


PARTS = [0, *[pytest.param(k, marks=pytest.mark.sweep) for k in range(1, 12)]]

parts = pytest.mark.parametrize("part", PARTS)


@pytest.mark.slow
@pytest.mark.timeout(LONG + 60)
@parts
def test_without_a_needed_name_the_import_is_refused(part: int) -> None:
    for path, message in results_without(_torch.NEEDED[part::12]).items():
        name = path.replace(":", ".").removeprefix("torch.")
        assert message.startswith("ImportError"), f"{path}: {message}"
        assert f"torch {torch.__version__}" in message and name in message, message


@pytest.mark.slow
@pytest.mark.timeout(LONG + 60)
@parts
def test_a_pipe_without_any_other_name_is_right(part: int) -> None:
    for path, found in results_without(_torch.OTHERS[part::12]).items():
        assert found == "right", f"{path}: {found}"


PUBLIC = {
    "torch", "torch.amp", "torch.autograd", "torch.autograd.function", "torch.autograd.graph",
    "torch.autograd.profiler", "torch.distributed", "torch.distributed.device_mesh",
    "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.pipelining.schedules", "torch.distributed.tensor", "torch.nn",
    "torch.nn.functional", "torch.nn.utils", "torch.nn.utils.rnn",
    "torch.optim", "torch.overrides", "torch.utils", "torch.utils.checkpoint",
}  # fmt: skip
"""The documented modules of torch, whose names may be imported anywhere."""


def test_only_documented_modules_of_torch_are_imported_elsewhere() -> None:
    imported = {
        module
        for file in FILES
        if file.name != "_torch.py"
        for module, _ in imports_of(file)
        if module.split(".")[0] == "torch"
    }
    assert imported <= PUBLIC


@pytest.mark.parametrize(
    "mode", [pytest.param("no_grad", marks=pytest.mark.sweep), "inference_mode"]
)
def test_pipert_may_be_imported_where_gradients_are_disabled(mode: str) -> None:
    script = f"""
import torch
with torch.{mode}():
    import pipert
pipe = pipert.Pipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), [1], devices=["cpu"], chunks=2)
with pipe:
    pipe.forward_backward(torch.ones(2, 2), loss_fn=lambda y, _: y.sum())
    assert pipe[0].weight.grad is not None
"""
    done = scripts.run(script, fresh=True)
    assert done.returncode == 0, done.stderr
