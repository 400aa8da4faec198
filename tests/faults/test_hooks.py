"""Tests R3 to R5 if hooks raise, and outside the layers.

Hooks of layers and of tensors, and the caller's saved-tensor hooks, run on pipert's
threads and autograd's. Their errors propagate unchanged and leave nothing behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from tests.faults.injector import Custom, Failure, Layer, Setting, micro_batch_of, wrongs_of

pytestmark = pytest.mark.usefixtures("no_gc_in_module")

MODES = ("always", "except_last", "never")
KINDS = (Failure, Custom, KeyboardInterrupt, StopIteration, MemoryError)

modes = pytest.mark.parametrize("checkpoint", MODES)
kinds = pytest.mark.parametrize("kind", KINDS)


def layers_of(setting: Setting) -> list[Layer]:
    return [layer for layer in setting.pipe if isinstance(layer, Layer)]


# Hooks of layers ----------------------------------------------------------------------------------


def forward_pre_hook(layer: Layer) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Tensor]) -> None:
        phase = "hook in recomputation" if is_recomputing() else "hook"
        layer.site.strike(phase, micro_batch_of(args[0]), layer.j)

    return hook


def forward_hook(layer: Layer) -> Callable[..., None]:
    pre_hook = forward_pre_hook(layer)
    return lambda module, args, output: pre_hook(module, args)


def backward_hook(layer: Layer) -> Callable[..., None]:
    """Counts its calls, one per micro-batch; autograd goes from the last to the first."""
    count = itertools.count()
    return lambda *_: layer.site.strike("hook", next(count), layer.j)


REGISTER: dict[str, Callable[[Layer], Any]] = {
    "forward pre hook": lambda layer: layer.register_forward_pre_hook(forward_pre_hook(layer)),
    "forward hook": lambda layer: layer.register_forward_hook(forward_hook(layer)),
    "forward hook, always called": lambda layer: layer.register_forward_hook(
        forward_hook(layer), always_call=True
    ),
    "full backward pre hook": lambda layer: layer.register_full_backward_pre_hook(
        backward_hook(layer)
    ),
    "full backward hook": lambda layer: layer.register_full_backward_hook(backward_hook(layer)),
    "hook of its output": lambda layer: layer.register_forward_hook(
        lambda module, args, output, hook=backward_hook(layer): (
            output.register_hook(hook) and None if output.requires_grad else None
        )
    ),
}


@pytest.mark.pairwise
@kinds
@modes
@pytest.mark.parametrize("hook", REGISTER)
def test_an_error_in_a_layers_hook_is_raised(
    hook: str, checkpoint: str, kind: type[BaseException]
) -> None:
    setting = Setting(2, 3, checkpoint)
    setting.site.arm("hook", 1, 1, kind("in a hook"))
    with setting.pipe:
        setting.x.requires_grad_()  # torch warns when a full backward hook has no gradient to see
        handles = [REGISTER[hook](layer) for layer in layers_of(setting)]
        note = None
        if hook.startswith("forward"):
            note = "in forward F[1,1]: partition 1 on cpu, layer '1' (Layer), micro-batch 1 of 3"
        assert wrongs_of(setting, setting.step, note) == []
        for handle in handles:
            handle.remove()


@pytest.mark.pairwise
@kinds
@modes
def test_an_error_in_a_parameters_hook_is_raised(
    checkpoint: str, kind: type[BaseException]
) -> None:
    setting = Setting(2, 2, checkpoint)
    setting.site.arm("hook", 0, 0, kind("in a hook"))
    with setting.pipe:
        first = layers_of(setting)[0]
        weight: Any = first.weight
        weight.register_post_accumulate_grad_hook(backward_hook(first))
        assert wrongs_of(setting, setting.step) == []


# In a task, but outside of its layers -------------------------------------------------------------


@pytest.mark.layered  # values are flattened inside of layers
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize(("phase", "j"), [("arrive", 0), ("leave", 0), ("leave", 1), ("pop", 1)])
def test_an_error_in_a_task_outside_its_layers_names_the_task(
    phase: str, j: int, kind: type[BaseException]
) -> None:
    """Copies, skips and user-defined pytrees can fail there, mostly for lack of memory."""
    setting = Setting(2, 3, "except_last", skips=phase == "pop", boxed=phase != "pop")
    setting.site.arm(phase, 1, j, kind("outside of layers"))
    with setting.pipe:
        note = f"in forward F[1,{j}]: partition {j} on cpu, micro-batch 1 of 3"
        assert wrongs_of(setting, setting.step, note) == []


# Errors that cannot be noted on -------------------------------------------------------------------


class Frozen(Exception):
    """An error that takes no notes, like those of other languages or frozen dataclasses."""

    def add_note(self, note: str) -> None:
        raise AttributeError("no notes")


class Noted(Exception):
    """An error whose notes have a form of their own."""

    __notes__: Any = ("mine",)


@pytest.mark.pairwise
@pytest.mark.parametrize("phase", ["forward", "recomputation"])
@pytest.mark.parametrize("kind", [Frozen, Noted])
def test_an_error_that_takes_no_notes_is_raised_as_it_is(kind: type[Exception], phase: str) -> None:
    setting = Setting(1, 1, "always")
    setting.site.arm(phase, 0, 0, kind("as it is"))
    with setting.pipe:
        assert wrongs_of(setting, setting.step) == []


class Hides(nn.Module):
    """A layer that fails on a value that cannot be shown."""

    class Value:
        __slots__ = ()

    class Unhashable(dict[Any, Any]):
        def items(self) -> Any:
            raise LookupError("cannot be shown")

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.Unhashable(x=x)
        raise Failure("the one to be raised")


def test_an_error_in_a_layer_whose_input_cannot_be_shown_is_raised_as_it_is() -> None:
    with Pipe(nn.Sequential(Hides(), Hides()), [2], devices=["cpu"]) as pipe:
        with pytest.raises(Failure, match="the one to be raised"):
            pipe(torch.rand(1, 1))
