"""Tests promise 4 of docs/contract.md: batch normalisation, and its deferred statistics.

Each micro-batch is normalised by itself. Deferred, running statistics are updated once for a
mini-batch, to those of the plain module. Where they are compared with the plain module's, the
BatchNorm comes first: what comes before it is normalised by micro-batch, so that later layers get
other inputs than without a pipe."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipert import NestedCheckpointError, Pipe, is_recomputing
from tests.helpers.caller_threads import Caller
from tests.helpers.torchscript import uses_torchscript
from tests.helpers.ways import (
    MODES,
    Way,
    batch,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    take_step,
)

DOUBLE = torch.float64


def norm_first(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(norm, nn.Flatten(), nn.Tanh()).double()


def deferred(module: nn.Sequential, chunks: int = 4, checkpoint: str = "except_last") -> Pipe:
    balance = [1, len(module) - 1]
    where = ["cpu", "cpu"]
    return Pipe(
        module, balance, devices=where, chunks=chunks, checkpoint=checkpoint,
        deferred_batch_norm=True,
    )  # fmt: skip


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def images(rows: int, dims: int = 0) -> Tensor:
    return torch.randn(rows, 3, *[4] * dims, dtype=DOUBLE) * 2 + 1


def train(pipe: Pipe, x: Tensor) -> None:
    torch.autograd.backward(pipe(x.requires_grad_()).square().sum())


# What it computes ---------------------------------------------------------------------------------


class ByTorch(nn.BatchNorm1d):
    """A norm that calls the function below ``torch.nn.functional``."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked.add_(1)
        return torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, True, self.momentum,
            self.eps, False,
        )  # fmt: skip


class Counts(nn.BatchNorm1d):
    """A norm that counts as BatchNorm did in old versions of torch."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked = self.num_batches_tracked + 1
        return F.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.1)


class Own(nn.Module):
    """A module that normalises like BatchNorm but is none."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.var: Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True, momentum=0.3)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        y: Tensor = self.norm(2 * x)
        return y


KINDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "1d": (lambda: nn.BatchNorm1d(3), 0),
    "1d of sequences": (lambda: nn.BatchNorm1d(3), 1),
    "2d": (lambda: nn.BatchNorm2d(3), 2),
    "3d": (lambda: nn.BatchNorm3d(3), 3),
    "no affine": (lambda: nn.BatchNorm2d(3, affine=False), 2),
    "cumulative average": (lambda: nn.BatchNorm1d(3, momentum=None), 0),
    "another momentum": (lambda: nn.BatchNorm1d(3, momentum=0.7), 0),
    "momentum 0": (lambda: nn.BatchNorm1d(3, momentum=0.0), 0),
    "no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), 0),
    "instance norm": (lambda: nn.InstanceNorm2d(3), 2),
    "by torch's function": (lambda: ByTorch(3), 0),
    "counting in another way": (lambda: Counts(3), 0),
    "no BatchNorm": (Own, 0),
    "called twice": (Twice, 0),
}


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_plain_module(kind: str, way: Way) -> None:
    make, dims = KINDS[kind]
    module = norm_first(make())
    plain = copy.deepcopy(module)
    with piped(module, [1, 2], way, 4, deferred_batch_norm=True) as pipe:
        for rows in (9, 8, 13):
            x = images(rows, dims)
            take_step(pipe, way, x.requires_grad_())
            plain(x)
    same(statistics(module), statistics(plain))


@pytest.mark.parametrize("rows", [2, 5])
def test_statistics_are_of_the_micro_batches_there_were(rows: int) -> None:
    """PITFALLS 5: with fewer micro-batches than chunks they were never committed."""
    module = norm_first(nn.BatchNorm2d(3))
    plain = copy.deepcopy(module)
    with deferred(module, chunks=6) as pipe:
        x = images(rows, 2)
        pipe(x)
        plain(x)
    same(statistics(module), statistics(plain))


class ByHand(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


def test_a_norm_whose_statistics_cannot_be_deferred_is_refused() -> None:
    module = norm_first(ByHand(3))
    x = images(8).requires_grad_()
    with deferred(module) as pipe:
        with pytest.raises(RuntimeError, match="ByHand.*deferred_batch_norm=False"):
            pipe(images(8))
        with pytest.raises(RuntimeError, match="ByHand.*deferred_batch_norm=False"):
            pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean())
    assert x.grad is None


class Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.norm, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch < 2.13
def test_a_checkpoint_of_torch_around_a_deferred_norm_is_refused() -> None:
    with deferred(norm_first(Checkpointing())) as pipe:
        with pytest.raises(NestedCheckpointError, match="BatchNorm"):
            pipe(images(8))


# When -------------------------------------------------------------------------------------------


def test_eval_updates_nothing_and_uses_the_statistics() -> None:
    module = norm_first(nn.BatchNorm1d(3))
    with deferred(module) as pipe:
        pipe(images(8))
        plain = copy.deepcopy(module).eval()
        pipe.eval()
        x = images(8)
        torch.testing.assert_close(pipe(x), plain(x))
    same(statistics(module), statistics(plain))


class Frozen(nn.BatchNorm1d):
    """A norm that uses its running statistics in every mode."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, training=False)


def test_a_layer_that_normalises_by_its_statistics_while_it_trains_is_left_alone() -> None:
    norm = Frozen(3)
    assert norm.running_mean is not None
    norm.running_mean.fill_(1.0)
    module = norm_first(norm)
    before, x = statistics(module), images(8)
    with deferred(module) as pipe:
        torch.testing.assert_close(pipe(x), module(x))
    same(statistics(module), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_statistics_are_updated_without_grad_as_in_the_plain_module(mode: Any) -> None:
    module = norm_first(nn.BatchNorm1d(3))
    plain = copy.deepcopy(module)
    x = images(8)
    with mode(), deferred(module) as pipe:
        pipe(x)
        plain(x)
    same(statistics(module), statistics(plain))


class Failing(nn.Module):
    fail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail and not is_recomputing() and x.size(0) == 2:
            raise ValueError("as told")
        return x


def test_nothing_of_a_failed_call_gets_into_the_next() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), Failing()).double()
    plain = copy.deepcopy(module)
    x = images(8)
    with deferred(module) as pipe:
        Failing.fail = True
        try:
            with pytest.raises(ValueError, match="as told"):
                pipe(images(11))
        finally:
            Failing.fail = False
        pipe(x)
    plain(x)
    same(statistics(module), statistics(plain))


def test_callers_that_are_inside_at_once_do_not_mix_their_statistics() -> None:
    """Their tasks are mixed: the second caller's come in between, and the barrier makes it so."""
    barrier = threading.Barrier(2)
    module = nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Identity()).double()
    plain = copy.deepcopy(module)
    batches = [images(8), images(8) + 100]
    with deferred(module, chunks=2) as pipe:

        def call(x: Tensor) -> None:
            barrier.wait(5.0)
            pipe(x)

        callers = [Caller(partial(call, x)) for x in batches]
        for caller in callers:
            caller.result()
    for x in batches:
        plain(x)
    same(statistics(module), statistics(plain))


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_deferring_pipe_in_a_layer_updates_nothing_when_it_is_recomputed(checkpoint: str) -> None:
    inner = nn.Sequential(nn.BatchNorm1d(3)).double()
    pipe = Pipe(inner, [1], devices=["cpu"], chunks=2, deferred_batch_norm=True)
    layer = nn.Sequential(pipe, nn.Tanh())  # without which there would be nothing to recompute
    with pipe, deferred(nn.Sequential(layer, nn.Identity()), 2, checkpoint) as outer:
        loss = outer(images(8).requires_grad_()).square().sum()
        before = statistics(inner)
        torch.autograd.backward(loss)
    assert before["0.num_batches_tracked"] == 2
    same(statistics(inner), before)


# At wrapping --------------------------------------------------------------------------------------


def wrap(module: nn.Sequential, **kwargs: Any) -> None:
    Pipe(module, [len(module)], devices=["cpu"], chunks=2, **kwargs).close()


def test_a_training_batchnorm_without_a_choice_gets_one_warning_of_the_line_of_the_user() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.warns(UserWarning, match=r"'1\.0'.*deferred_batch_norm=True") as caught:
        Pipe(module, [2], devices=["cpu"])
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("choice", [None, True, False])
def test_sync_batchnorm_is_refused_with_a_remedy(choice: bool | None) -> None:
    module = nn.Sequential(nn.Sequential(nn.SyncBatchNorm(3)))
    with pytest.raises(TypeError, match=r"'0\.0' is a SyncBatchNorm.*deferred_batch_norm=True"):
        wrap(module, deferred_batch_norm=choice)


@uses_torchscript
def test_a_scripted_batchnorm_cannot_be_deferred() -> None:
    module = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)))
    with pytest.raises(TypeError, match="scripted"):
        wrap(module, deferred_batch_norm=True)


class To(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_recomputed_norm_computes_what_its_forward_did(
    dtype: torch.dtype, affine: bool, in_step: bool
) -> None:
    x, found = torch.randn(8, 3, 40), list[list[Tensor]]()
    layers = nn.Sequential(nn.Conv1d(3, 3, 3), To(dtype), nn.BatchNorm1d(3, affine=affine))
    for mode in ("never", "always"):
        module = copy.deepcopy(layers)
        with Pipe(
            module, [3], devices=["cpu"], chunks=2, checkpoint=mode, deferred_batch_norm=False
        ) as pipe:
            if in_step:
                pipe.forward_backward(x, loss_fn=lambda y, _: y.float().tanh().mean())
            else:
                pipe(x).float().tanh().mean().backward()
        found.append([p.grad for p in pipe.parameters() if p.grad is not None] + [*pipe.buffers()])
    assert all(map(torch.equal, *found))


def normalised() -> nn.Sequential:
    torch.manual_seed(2)
    norms = [nn.BatchNorm1d(4, dtype=torch.float64) for _ in range(2)]
    return nn.Sequential(linear(3, 4), norms[0], nn.Tanh(), linear(4, 4), norms[1], linear(4, 2))


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "each micro-batch"])
def test_each_micro_batch_is_normalised_by_itself(deferred: bool, way: Way) -> None:
    module, plain, x = normalised(), normalised(), batch(8)
    with piped(module, [2, 4], way, 2, deferred_batch_norm=deferred) as pipe:
        take_step(pipe, way, x)
    for part in x.chunk(2):
        (mean(plain(part), None) / 2).backward()
    same(grads_of(module), grads_of(plain))
