"""Tests that nobody notices how BatchNorm is called in a recomputation."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils._python_dispatch import TorchDispatchMode

from pipert import Pipe, is_recomputing
from pipert.layers.compiling import is_compiled
from tests.contract.ways import CALL, Way, batch, grads_of, linear, mean, same, take_step
from tests.torchscript import uses_torchscript

SLOT = "_compiled_call_impl"
RECOMPUTING = [Way(schedule, "always") for schedule in (CALL, "gpipe", "1f1b")]
each_way = pytest.mark.parametrize("way", RECOMPUTING, ids=["call", "gpipe", "1f1b"])


class Calling(nn.Module):
    """A layer that calls a norm, and something else before it in a recomputation."""

    def __init__(self, norm: nn.Module, first: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.norm = norm
        self.first = first

    def forward(self, x: Tensor) -> Any:
        if is_recomputing():
            self.first(self.norm)
        return self.norm(x)


def norm_of(features: int = 4, **options: Any) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(features, dtype=torch.float64, **options)


def model(*norms: nn.Module) -> nn.Sequential:
    """Makes a model large enough for its graph to be dropped and recomputed."""
    torch.manual_seed(2)
    layers = [linear(3, 4)]
    for norm in norms:
        layers += [norm, nn.Tanh(), linear(4, 4), nn.Tanh(), linear(4, 4), nn.Tanh(), linear(4, 4)]
    return nn.Sequential(*layers)


def check(module: nn.Sequential, way: Way, chunks: int = 2) -> None:
    """Compares gradients and statistics with the plain module's, run micro-batch by micro-batch."""
    plain = copy.deepcopy(module)
    options: Any = {"devices": ["cpu"], "checkpoint": way.checkpoint, "deferred_batch_norm": False}
    x = batch(4 * chunks)
    with Pipe(module, [len(module)], chunks=chunks, **options) as pipe:
        take_step(pipe, way, x)
    for part in x.chunk(chunks):
        (mean(plain(part), None) / chunks).backward()
    same(grads_of(module), grads_of(plain))
    same(dict(module.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)


def forget_statistics(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    norm.track_running_stats = False
    return norm


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": norm_of,
    "cumulative": lambda: norm_of(momentum=None),
    "without weights": lambda: norm_of(affine=False),
    "without statistics": lambda: norm_of(track_running_stats=False),
    "that forgets its statistics": lambda: forget_statistics(norm_of()),
    "frozen": lambda: norm_of().eval(),
}


@each_way
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_and_statistics_are_those_of_the_plain_module(kind: str, way: Way) -> None:
    check(model(*[NORMS[kind]() for _ in range(6)]), way)


def test_a_recomputation_updates_no_statistics_and_calls_no_kernel_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[bool, float]] = []
    normalise = F.batch_norm

    def note(*args: Any) -> Tensor:
        given.append((args[1] is norm.running_mean, args[6]))
        return normalise(*args)

    norm = norm_of()
    monkeypatch.setattr(F, "batch_norm", note)
    with Pipe(
        model(norm), [8], devices=["cpu"], checkpoint="always", deferred_batch_norm=False
    ) as pipe:
        take_step(pipe, RECOMPUTING[0], batch(4))
    assert given == [(True, 0.1), (False, 0.0)]


# Who looks.

HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward": lambda norm, hook: norm.register_forward_hook(hook),
    "before": lambda norm, hook: norm.register_forward_pre_hook(hook),
    "of all": lambda norm, hook: all_modules.register_module_forward_hook(hook),
    "of all before": lambda norm, hook: all_modules.register_module_forward_pre_hook(hook),
}


@each_way
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_called_in_a_recomputation_as_well(kind: str, way: Way) -> None:
    called, norm = [], norm_of()

    def hook(module: nn.Module, *_: Any) -> None:
        if module is norm:
            called.append(is_recomputing())

    module = model(norm, *[norm_of() for _ in range(5)])
    handle = HOOKS[kind](norm, hook)
    try:
        with Pipe(
            module, [len(module)], devices=["cpu"], checkpoint="always", deferred_batch_norm=False
        ) as pipe:
            take_step(pipe, way, batch(4))
    finally:
        handle.remove()
    assert called == [False, True]
    assert norm.num_batches_tracked == 1


@each_way
def test_a_forward_of_its_own_is_called_again(way: Way) -> None:
    called, norm = [], norm_of()
    usual = norm.forward

    def forward(x: Tensor) -> Tensor:
        called.append(is_recomputing())
        return usual(x)

    norm.forward = forward  # type: ignore[assignment]
    options: Any = {"devices": ["cpu"], "checkpoint": "always", "deferred_batch_norm": False}
    with Pipe(model(norm), [8], **options) as pipe:
        take_step(pipe, way, batch(4))
    assert called == [False, True]
    assert norm.num_batches_tracked == 1


@each_way
def test_a_dispatch_mode_sees_the_same_operations_as_in_the_forward(way: Way) -> None:
    seen: dict[bool, list[str]] = {False: [], True: []}

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[is_recomputing()].append(str(func))
            return func(*args, **kwargs or {})

    class Looking(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            with Look():  # type: ignore[no-untyped-call]
                return super().forward(x)  # type: ignore[no-untyped-call]

    module = nn.Sequential(Looking(*model(*[norm_of() for _ in range(6)])))
    with Pipe(
        module, [1], devices=["cpu"], checkpoint="always", deferred_batch_norm=False
    ) as pipe:
        take_step(pipe, way, batch(4))
    normalised = [[name for name in names if "batch_norm" in name] for names in seen.values()]
    assert normalised[0] == normalised[1] and len(normalised[0]) == 6


# Others meanwhile.


def in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@each_way
def test_training_the_norm_on_another_thread_meanwhile_updates_its_statistics(way: Way) -> None:
    x, norm = batch(4)[:, [0, 1, 2, 0]], norm_of()
    module = model(Calling(norm, lambda norm: in_a_thread(lambda: norm(x))))
    own = copy.deepcopy(norm)
    options: Any = {"devices": ["cpu"], "checkpoint": "always", "deferred_batch_norm": False}
    with Pipe(module, [len(module)], **options) as pipe:
        given = batch(4)
        take_step(pipe, way, given)
    own(module[0](given))
    own(x)
    same(dict(norm.named_buffers()), dict(own.named_buffers()), rtol=0, atol=0)


@each_way
def test_a_norm_looks_as_always_meanwhile_and_is_not_compiled(way: Way) -> None:
    found: list[Any] = []

    def look(norm: nn.Module) -> None:
        copies = copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))
        found.append([is_compiled(norm), *[SLOT in vars(one) for one in copies]])

    norm = norm_of()
    with Pipe(
        model(Calling(norm, look)), [8], devices=["cpu"], checkpoint="always",
        deferred_batch_norm=False,
    ) as pipe:  # fmt: skip
        take_step(pipe, way, batch(4))
    assert found == [[False] * 3]


@each_way
def test_a_pipe_that_is_made_and_called_in_a_recomputation_updates_nothing_again(way: Way) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.Sequential(*[norm_of() for _ in range(6)])

        def forward(self, x: Tensor) -> Any:
            with Pipe(
                self.norms, [6], devices=["cpu"], checkpoint="never", deferred_batch_norm=False
            ) as inner:
                return inner(x)

    check(nn.Sequential(linear(3, 4), Nested(), linear(4, 2)), way)


def divide(_: nn.Module) -> None:
    raise ZeroDivisionError


@each_way
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_nothing_is_left_in_a_norm(fails: bool, way: Way) -> None:
    norm = norm_of()
    module = model(Calling(norm, divide if fails else lambda _: None))
    with Pipe(
        module, [len(module)], devices=["cpu"], checkpoint="always", deferred_batch_norm=False
    ) as pipe:
        if fails:
            with pytest.raises(ZeroDivisionError):
                take_step(pipe, way, batch(4))
        else:
            take_step(pipe, way, batch(4))
    assert SLOT not in vars(norm)


# What a recomputation of a norm is in.


@each_way
def test_a_norm_is_recomputed_after_a_call_in_inference_mode(way: Way) -> None:
    def infer(norm: nn.Module) -> None:
        with torch.inference_mode():
            norm(torch.ones(4, 4, dtype=torch.float64))

    module = model(Calling(norm_of(), infer), *[norm_of() for _ in range(5)])
    options: Any = {"devices": ["cpu"], "checkpoint": "always", "deferred_batch_norm": False}
    plain = copy.deepcopy(module)
    with Pipe(module, [len(module)], **options) as pipe:
        take_step(pipe, way, x := batch(4))
    mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


@each_way
@uses_torchscript
def test_a_norm_is_recomputed_in_a_transform(way: Way) -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm_of()

        def forward(self, x: Tensor) -> Any:
            def normalise(mean: Tensor, var: Tensor) -> Any:
                statistics = {"running_mean": mean, "running_var": var}
                return torch.func.functional_call(self.norm, statistics, (x,))

            zeros = torch.zeros(2, 4, dtype=torch.float64)
            return torch.vmap(normalise)(zeros, zeros + 1).sum(0) + self.norm(x)

    check(model(*[Ensemble() for _ in range(3)]), way, chunks=1)
