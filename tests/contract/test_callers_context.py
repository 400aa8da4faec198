"""Tests that each task of a call and of a step runs under the caller's context.

That nothing of it is left behind is in ``tests/workers/test_context.py``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipert import is_recomputing
from tests.helpers.caller_settings import ROWS, Block, Hooks, Row
from tests.helpers.ways import (
    CALL,
    Way,
    batch,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    seven_layers,
    take_step,
    ways,
)
from tests.layers import Apply, Labelled

rows = pytest.mark.parametrize("row", ROWS[2:], ids=lambda row: row.name)
"""But those without a graph, which a step is refused in."""


class _Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None]) -> Tensor:
        ctx.note = note
        ctx.save_for_backward(x)  # or nobody would need it again
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        ctx.note("B")
        return grad, None


def notes_of(way: Way, block: Block, look: Callable[[], Any]) -> dict[str, set[Any]]:
    """Returns what ``look`` returns in each phase; ``block`` is entered around the forward."""
    found: dict[str, set[Any]] = {}

    def note(phase: str) -> None:
        found.setdefault(phase, set()).add(look())

    def layer(x: Tensor) -> Tensor:
        note("R" if is_recomputing() else "F")
        y: Tensor = _Notes.apply(x, note)  # type: ignore[no-untyped-call]
        return y

    def loss(y: Tensor, target: Any) -> Any:
        note("loss")
        return y.square().mean()

    module, x = nn.Sequential(linear(3, 3), Apply(layer), linear(3, 3), Apply(layer)), batch(4)
    with piped(module, [2, 2], way, chunks=2) as pipe:
        if way.schedule == CALL:
            with block():
                computed = loss(pipe(x), None)
            computed.backward()
        else:
            with block():
                pipe.forward_backward(x, loss_fn=loss, schedule=way.schedule)
    assert ("R" in found) == (way.checkpoint != "never")
    return found


@pytest.mark.pairwise
@each_way
@rows
def test_tasks_and_the_loss_see_the_callers_context(way: Way, row: Row) -> None:
    if row.name == "deterministic" and way.schedule == CALL:
        pytest.skip("the process has it, so a recomputation outside of the block does without")
    found = notes_of(way, row.block, row.see)
    assert [found.get(phase, {row.inside}) for phase in ("F", "R", "loss")] == [{row.inside}] * 3


@pytest.mark.pairwise
@ways
@rows
def test_a_function_in_a_steps_backward_sees_the_context_that_torch_would_give_it(
    way: Way, row: Row
) -> None:
    """Casts of the forward are cast back by the graph, and torch hides function modes."""
    shown = ("dispatch modes", "context variables", "deterministic")
    plain = row.see()
    found = notes_of(way, row.block, row.see)
    assert found["B"] == {row.inside if row.name in shown else plain}


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@ways
def test_the_number_of_intra_op_threads_is_shared_out_in_all_tasks(way: Way) -> None:
    found = notes_of(way, two_threads, torch.get_num_threads)
    assert [found[phase] for phase in ("F", "B", "loss")] == [{1}] * 3


@each_way
@pytest.mark.parametrize("hooks", [Hooks(), torch.autograd.graph.save_on_cpu], ids=["lossy", "cpu"])
def test_gradients_under_saved_tensor_hooks_are_those_of_the_plain_module(
    way: Way, hooks: Block
) -> None:
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)
    with hooks():
        mean(plain(x), None).backward()
    with piped(module, [3, 4], way) as pipe, hooks():
        take_step(pipe, way, x)
    same(grads_of(module), grads_of(plain))


@each_way
def test_saved_tensor_hooks_unpack_all_that_they_packed(way: Way) -> None:
    hooks = Hooks()
    with piped(seven_layers(), [3, 4], way) as pipe, hooks():
        take_step(pipe, way, batch(7))
    assert hooks.unpacked == hooks.packed > 0


@each_way
def test_a_recomputation_gets_tensors_of_the_class_that_its_forward_got(way: Way) -> None:
    found: dict[bool, set[type]] = {False: set(), True: set()}

    def layer(x: Tensor) -> Tensor:
        found[is_recomputing()].add(type(x))
        return x.sin()

    as_another = Apply(lambda x: x.as_subclass(Labelled))
    module, x = nn.Sequential(linear(3, 3), as_another, Apply(layer), Apply(layer)), batch(4)
    with piped(module, [3, 1], way, chunks=2) as pipe:
        take_step(pipe, way, x, loss_fn=lambda y, _: y.square().mean())
    assert found[False] == {Labelled}
    assert found[True] == ({Labelled} if way.checkpoint != "never" else set())


# Settings that are not carried, but of the process ------------------------------------------------


class Setting(NamedTuple):
    set: Callable[[Any], object]
    see: Callable[[], Any]
    inside: Any


SETTINGS = {
    "default dtype": Setting(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "deterministic": Setting(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
    "sdpa kernel": Setting(
        torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled, False
    ),
}


@contextlib.contextmanager
def inside(setting: Setting) -> Iterator[None]:
    before = setting.see()
    assert before != setting.inside
    setting.set(setting.inside)
    try:
        yield
    finally:
        setting.set(before)


@pytest.mark.parametrize("schedule", [CALL, "1f1b"])
@pytest.mark.parametrize("name", SETTINGS)
def test_workers_see_a_setting_of_the_process_as_it_is_then(name: str, schedule: str) -> None:
    """It is set around a step, or around the forward only of a call."""
    setting, way = SETTINGS[name], Way(schedule, "always")
    seen: dict[bool, set[Any]] = {False: set(), True: set()}

    def see(x: Tensor) -> Tensor:
        seen[is_recomputing()].add(setting.see())
        return x.sin()

    later = setting.see() if schedule == CALL else setting.inside
    with piped(nn.Sequential(linear(3, 3), Apply(see)), [1, 1], way, chunks=2) as pipe:
        with inside(setting):
            x = torch.randn(4, 3, dtype=torch.float64)
            loss = pipe(x).sum() if schedule == CALL else take_step(pipe, way, x)
        if schedule == CALL:
            loss.backward()
    assert seen == {False: {setting.inside}, True: {later}}


# Around one of forward and backward ---------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(8, 24), linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def gradients(
    model: nn.Module, forward: Block, backward: Block
) -> list[Tensor | None]:
    with forward():
        loss = model(torch.ones(4, 5, 8, dtype=torch.float64)).square().mean()
    with backward():
        loss.backward()
    return [p.grad for p in model.parameters()]


def math() -> contextlib.AbstractContextManager[None]:
    return sdpa_kernel([SDPBackend.MATH])


@pytest.mark.parametrize(
    "forward, backward",
    [(math, contextlib.nullcontext), (contextlib.nullcontext, math)],
    ids=["around the forward", "around the backward"],
)
def test_a_recomputation_with_another_kernel_for_attention_is_right(
    forward: Block, backward: Block
) -> None:
    module = nn.Sequential(*[Attention() for _ in range(4)])
    plain = copy.deepcopy(module)
    with piped(module, [2, 2], Way(CALL, "always"), chunks=2) as pipe:
        found, expected = gradients(pipe, forward, backward), gradients(plain, forward, backward)
    torch.testing.assert_close(found, expected)
