"""Tests the settings of torch that are not carried: those of the process, and a few of a thread.

``docs/contract.md`` has the table. Those that are carried are in ``tests/contexts.py``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint, deterministic

import pipert
from pipert import is_recomputing
from tests.contexts import Block
from tests.contract.ways import CALL, Way, linear, piped, take_step

DOCS = Path(__file__).parents[2] / "docs" / "contract.md"


class Setting(NamedTuple):
    name: str
    """As in the table."""
    set: Callable[[Any], object]
    see: Callable[[], Any]
    inside: Any


@contextlib.contextmanager
def inside(setting: Setting) -> Iterator[None]:
    before = setting.see()
    assert before != setting.inside
    setting.set(setting.inside)
    try:
        yield
    finally:
        setting.set(before)


def attribute(name: str, owner: Any, key: str, value: Any) -> Setting:
    return Setting(name, lambda x: setattr(owner, key, x), lambda: getattr(owner, key), value)


def with_block(name: str, block: Block, see: Callable[[], Any], value: Any) -> Setting:
    """Makes a setting of which torch has only a block."""
    stack = contextlib.ExitStack()

    def enter(to: Any) -> None:
        stack.enter_context(block()) if to == value else stack.close()

    return Setting(name, enter, see, value)


torch_: Any = torch  # what torch does not type
cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
OF_THE_PROCESS = [
    Setting("set_default_dtype", torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    Setting("use_deterministic_algorithms", torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled, True),
    attribute("fill_uninitialized_memory", deterministic, "fill_uninitialized_memory", False),
    Setting("set_detect_anomaly", torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled,
            True),
    Setting("set_float32_matmul_precision", torch.set_float32_matmul_precision,
            torch.get_float32_matmul_precision, "medium"),
    Setting("set_warn_always", torch.set_warn_always, torch.is_warn_always_enabled, True),
    *[
        Setting("sdpa_kernel", getattr(cuda, f"enable_{kind}_sdp"),
                getattr(cuda, f"{kind}_sdp_enabled"), False)
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ],
    attribute("torch.backends", cudnn, "enabled", False),
    attribute("torch.backends", cudnn, "benchmark", True),
    attribute("torch.backends", cudnn, "deterministic", True),
    attribute("torch.backends", cuda.matmul, "allow_tf32", True),
    attribute("torch.backends", mkldnn, "enabled", False),
    attribute("torch.backends", torch.backends.opt_einsum, "strategy", "optimal"),
    Setting("torch.backends", torch.backends.mha.set_fastpath_enabled,
            torch.backends.mha.get_fastpath_enabled, False),
    with_block("check_sparse_tensor_invariants",
               lambda: torch_.sparse.check_sparse_tensor_invariants(True),
               torch_.sparse.check_sparse_tensor_invariants.is_enabled, True),
    with_block("set_checkpoint_early_stop", lambda: checkpoint.set_checkpoint_early_stop(False),
               lambda: checkpoint._enable_checkpoint_early_stop, False),
]  # fmt: skip
OF_A_THREAD = [
    with_block("set_multithreading_enabled",
               lambda: torch.autograd.set_multithreading_enabled(False),
               torch._C._is_multithreading_enabled, False),
    with_block("disable_saved_tensors_hooks",
               lambda: torch.autograd.graph.disable_saved_tensors_hooks("disabled"),
               torch_._C._autograd._saved_tensors_hooks_is_enabled, False),
    with_block("DisableTorchFunctionSubclass", torch._C.DisableTorchFunctionSubclass,
               torch._C._is_torch_function_enabled, False),
    with_block("optimized_execution", lambda: torch_.jit.optimized_execution(False),
               torch._C._get_graph_executor_optimize, False),
]  # fmt: skip


class Seeing(nn.Linear):
    """Notes a setting in its forward and in its recomputation."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.setting = setting
        self.seen: dict[str, set[Any]] = {"F": set(), "R": set()}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["R" if is_recomputing() else "F"].add(self.setting.see())
        return super().forward(x)


def seen(setting: Setting, way: Way) -> dict[str, set[Any]]:
    """Returns what layers see if it is set around a step, or around the forward only in a call."""
    layer = Seeing(setting)
    x = torch.randn(4, 3, dtype=torch.float64)
    with piped(nn.Sequential(linear(3, 3), layer), [1, 1], way, chunks=2) as pipe:
        pipe(x)  # the workers are there before
        layer.seen["F"].clear()
        with inside(setting):
            if way.schedule == CALL:
                loss = pipe(x).sum()
            else:
                take_step(pipe, way, x)
        if way.schedule == CALL:
            loss.backward()
    return layer.seen


of_ways = pytest.mark.parametrize("way", [Way(CALL, "always"), Way("1f1b", "always")], ids=str)


@of_ways
@pytest.mark.parametrize("setting", OF_THE_PROCESS, ids=lambda setting: setting.name)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:TF32")
def test_workers_see_a_setting_of_the_process_as_it_is_then(setting: Setting, way: Way) -> None:
    later = setting.see() if way.schedule == CALL else setting.inside
    assert seen(setting, way) == {"F": {setting.inside}, "R": {later}}


@of_ways
@pytest.mark.parametrize("setting", OF_A_THREAD, ids=lambda setting: setting.name)
def test_workers_do_not_see_these_settings_of_the_callers(setting: Setting, way: Way) -> None:
    assert seen(setting, way) == {"F": {setting.see()}, "R": {setting.see()}}


@pytest.mark.parametrize("setting", [*OF_THE_PROCESS, *OF_A_THREAD], ids=lambda one: one.name)
def test_the_table_has_the_setting(setting: Setting) -> None:
    assert setting.name in DOCS.read_text()


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
whole = pytest.mark.parametrize("any_model", [False, True], ids=["Pipe", "any model"])


def attending(layers: int, any_model: bool) -> tuple[nn.Module, Any]:
    module = nn.Sequential(*[Attention() for _ in range(layers)])
    plain = copy.deepcopy(module)
    options: Any = {"devices": ["cpu"] * 2, "chunks": 2, "checkpoint": "always"}
    half = layers // 2
    if any_model:
        return plain, pipert.pipeline(module, [str(half)], **options)
    return plain, pipert.Pipe(module, [half, half], **options)


@whole
@pytest.mark.parametrize(
    "forward, backward",
    [(only(MATH), contextlib.nullcontext), (contextlib.nullcontext, only(MATH))],
    ids=["around the forward", "around the backward"],
)
def test_a_recomputation_with_another_kernel_for_attention_is_right(
    forward: Block, backward: Block, any_model: bool
) -> None:
    plain, made = attending(4, any_model)
    with made as pipe:
        found, expected = gradients(pipe, forward, backward), gradients(plain, forward, backward)
    torch.testing.assert_close(found, expected)


@whole
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("backends", [(FLASH,), (FLASH, MATH)], ids=len)
def test_one_with_the_same_kernel_is_right(backends: Any, cast: bool, any_model: bool) -> None:
    plain, made = attending(4, any_model)

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with sdpa_kernel(list(backends)), torch.autocast("cpu", enabled=cast):
            yield

    with made as pipe:
        found, expected = gradients(pipe, block), gradients(plain, block)
    tolerance: Any = {"rtol": 0.05, "atol": 0.01} if cast else {}
    torch.testing.assert_close(found, expected, **tolerance)
