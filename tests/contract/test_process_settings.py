"""Tests settings of torch that are not carried, but of the process (``docs/contract.md``)."""

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

from pipert import Pipe, is_recomputing
from tests.helpers.caller_settings import Block
from tests.helpers.ways import CALL, Way, linear, piped, take_step
from tests.layers import Apply


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
    model: nn.Module, forward: Block, backward: Block = contextlib.nullcontext
) -> list[Tensor | None]:
    with forward():
        loss = model(torch.ones(4, 5, 8, dtype=torch.float64)).square().mean()
    with backward():
        loss.backward()
    return [p.grad for p in model.parameters()]


def only(*backends: SDPBackend) -> Block:
    return lambda: sdpa_kernel(list(backends))


MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize(
    "forward, backward",
    [(only(MATH), contextlib.nullcontext), (contextlib.nullcontext, only(MATH))],
    ids=["around the forward", "around the backward"],
)
def test_a_recomputation_with_another_kernel_for_attention_is_right(
    forward: Block, backward: Block
) -> None:
    module = nn.Sequential(*[Attention() for _ in range(4)])
    plain = copy.deepcopy(module)
    with Pipe(module, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always") as pipe:
        found, expected = gradients(pipe, forward, backward), gradients(plain, forward, backward)
    torch.testing.assert_close(found, expected)
