"""Helpers for a training loop that runs in one process or, under torchrun, in one per device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipert.distributed
from pipert import Pipe


class RanksPipe(pipert.distributed.Pipe):
    """A pipe with one partition per process that is used like ``pipert.Pipe``.

    All processes get the outputs, which the last one computes.
    """

    def __init__(self, model: nn.Sequential, balance: Sequence[int], **settings: Any) -> None:
        self.names = [name for name, _ in model.named_parameters()]  # in all partitions
        super().__init__(model, balance, **settings)
        self.balance = list(balance)
        self.devices = 2 * [next(self.parameters()).device]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the outputs and returns them in all processes."""
        outputs = [super().forward(*args, **kwargs)]
        dist.broadcast_object_list(outputs, src=dist.get_world_size() - 1)
        return outputs[0].to(self.devices[0])

    def forward_backward(self, *args: Any, schedule: str = "1f1b", **kwargs: Any) -> Any:
        """Runs a step; its order is the schedule that the pipe was made with, not ``schedule``."""
        return super().forward_backward(*args, **kwargs)


AnyPipe = Pipe | RanksPipe


def is_first() -> bool:
    """Whether this is the first process, which prints and saves."""
    return not dist.is_initialized() or dist.get_rank() == 0


def clip(pipe: AnyPipe) -> None:
    """Scales the gradients so that their norm, over the layers of all processes, is at most 1."""
    if isinstance(pipe, RanksPipe):
        nn.utils.clip_grads_with_norm_(pipe.parameters(), 1.0, pipe.grad_norm())
    else:
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)


def whole_state(
    pipe: AnyPipe, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the states of the whole model and its optimizer, in each process.

    They are what a single process would save. An optimizer numbers its own parameters, and each
    process has only some of them; here they are numbered in the order of the whole model.
    """
    model, local = pipe.state_dict(), optimizer.state_dict()
    if not isinstance(pipe, RanksPipe):
        return model, local
    numbers = [pipe.names.index(name) for name, _ in pipe.named_parameters()]
    numbered = {numbers[k]: entry for k, entry in local["state"].items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (model, numbered))
    model = {name: tensor for part, _ in parts for name, tensor in part.items()}
    state = {number: entry for _, part in parts for number, entry in part.items()}
    all_numbers = list(range(len(pipe.names)))
    groups = [{**group, "params": all_numbers} for group in local["param_groups"]]
    return model, {"state": state, "param_groups": groups}


def load_whole_state(
    pipe: AnyPipe,
    optimizer: torch.optim.Optimizer,
    model: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Loads what :func:`whole_state` returned, in any number of processes."""
    pipe.load_state_dict(model)
    if isinstance(pipe, RanksPipe):
        numbers = [pipe.names.index(name) for name, _ in pipe.named_parameters()]
        local = {k: state["state"][n] for k, n in enumerate(numbers) if n in state["state"]}
        local_numbers = list(range(len(numbers)))
        groups = [{**group, "params": local_numbers} for group in state["param_groups"]]
        state = {"state": local, "param_groups": groups}
    optimizer.load_state_dict(state)


def join() -> None:
    """Joins the processes that torchrun started."""
    if not dist.is_initialized():
        if "LOCAL_RANK" not in os.environ:
            raise ValueError("--distributed is for torchrun, which starts the processes")
        on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")


def leave() -> None:
    """Leaves the process group: the last thing that a process does when all has gone well.

    Otherwise a thread of the group may still be freeing a tensor while the interpreter ends, and
    then the process aborts (``terminate called without an active exception``).
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def say(text: str) -> None:
    """Prints in the first process only."""
    if is_first():
        print(text)
