"""What a training loop needs to run in one process or, under torchrun, in one for each device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import pipert.distributed
from pipert import Pipe

T = TypeVar("T")


class RanksPipe(pipert.distributed.Pipe):
    """A partition in each process, for the same loop: all processes get what the last computes."""

    def __init__(self, model: nn.Sequential, balance: Sequence[int], **settings: Any) -> None:
        self.names = [name for name, _ in model.named_parameters()]  # of all processes
        super().__init__(model, balance, **settings)
        self.balance = list(balance)
        self.devices = 2 * [next(self.parameters()).device]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs, in all processes."""
        outputs = [super().forward(*args, **kwargs)]
        dist.broadcast_object_list(outputs, src=dist.get_world_size() - 1)
        return outputs[0].to(self.devices[0])

    def forward_backward(self, *args: Any, schedule: str = "1f1b", **kwargs: Any) -> Any:
        """Go through a step by the schedule that the pipe was made with."""
        return super().forward_backward(*args, **kwargs)


AnyPipe = Pipe | RanksPipe


def is_first() -> bool:
    """Whether this process prints and saves."""
    return not dist.is_initialized() or dist.get_rank() == 0


def clip(pipe: AnyPipe, error_if_nonfinite: bool = False) -> None:
    """Scale the gradients of all layers, wherever they are, down to a norm of 1."""
    if isinstance(pipe, RanksPipe):
        norm = pipe.grad_norm()
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm.item()}")
        nn.utils.clip_grads_with_norm_(pipe.parameters(), 1.0, norm)
    else:
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0, error_if_nonfinite=error_if_nonfinite)


def whole_state(
    pipe: AnyPipe, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of the model and its optimizer as one process has them, in each process.

    An optimizer numbers its parameters, and each process has some of them. As in one process they
    are numbered in the model's order.
    """
    model, own = pipe.state_dict(), optimizer.state_dict()
    if not isinstance(pipe, RanksPipe):
        return model, own
    numbers = [pipe.names.index(name) for name, _ in pipe.named_parameters()]
    numbered = {numbers[k]: of_parameter for k, of_parameter in own["state"].items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (model, numbered))
    model = {name: tensor for part, _ in parts for name, tensor in part.items()}
    state = {number: found for _, part in parts for number, found in part.items()}
    every = list(range(len(pipe.names)))
    groups = [{**group, "params": every} for group in own["param_groups"]]
    return model, {"state": state, "param_groups": groups}


def load_whole_state(
    pipe: AnyPipe,
    optimizer: torch.optim.Optimizer,
    model: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Load what :func:`whole_state` returned, in one process or any number of them."""
    pipe.load_state_dict(model)
    if isinstance(pipe, RanksPipe):
        numbers = [pipe.names.index(name) for name, _ in pipe.named_parameters()]
        own = {k: state["state"][n] for k, n in enumerate(numbers) if n in state["state"]}
        every = list(range(len(numbers)))
        groups = [{**group, "params": every} for group in state["param_groups"]]
        state = {"state": own, "param_groups": groups}
    optimizer.load_state_dict(state)


def join(timeout: float | None = None) -> None:
    """Join the processes that torchrun has started; each waits ``timeout`` seconds for others."""
    if not dist.is_initialized():
        if "LOCAL_RANK" not in os.environ:
            raise ValueError("--distributed is for torchrun, which starts the processes")
        on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        limit = None if timeout is None else timedelta(seconds=timeout)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=limit)


def of_first(make: Callable[[], T]) -> T:
    """What ``make`` returns in the first process, which alone calls it, in each of them.

    Raises:
        RuntimeError: it has raised an error there, where that is raised.
    """
    made: list[Any] = [None, None]
    if is_first():
        try:
            made[0] = make()
        except Exception as error:
            if dist.is_initialized():  # the others must not wait for it
                dist.broadcast_object_list([None, repr(error)], src=0)
            raise
    if dist.is_initialized():
        dist.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise RuntimeError(f"the first process has failed: {made[1]}")
    value: T = made[0]
    return value


def say(text: str) -> None:
    """Print in one process."""
    if is_first():
        print(text)
