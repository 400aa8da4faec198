"""Tests the warning about attributes that a forward sets and later partitions read.

All micro-batches share such an attribute, so the warning names it."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.nn.utils import prune, weight_norm

import pipert
from pipert import SharedStateWarning


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)


class KeepingAMask(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.mask = x > 0
        return self.b(self.a(x)) * self.mask  # type: ignore[no-any-return]


class KeepingItInABuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)

    forward = KeepingAMask.forward


class CollectingLosses(Two):
    losses: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        self.losses = []
        x = self.a(x)
        self.losses.append(x.square().mean())
        return self.b(x)  # type: ignore[no-any-return]


class LayerWithALoss(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


class ReadingWhatALayerKeeps(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a = LayerWithALoss(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.a.loss  # type: ignore[no-any-return]


class EvaluatingMeanwhile(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.b.eval()
        y = self.b(self.a(x))
        self.b.train()
        return y  # type: ignore[no-any-return]


class Deleting(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.mask = x > 0
        y = self.b(self.a(x))  # whoever reads the mask here may find none
        self.__dict__.pop("mask", None)
        return y  # type: ignore[no-any-return]


class Scaled(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.scale  # type: ignore[no-any-return]


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: Tensor) -> Any:
        return functional_call(self.inner, {"scale": x.mean(0)}, (x,))


SHARING: list[tuple[type[nn.Module], str]] = [
    (KeepingAMask, "'mask'"),
    (KeepingItInABuffer, "'mask'"),
    (CollectingLosses, "'losses'"),
    (ReadingWhatALayerKeeps, r"'a\.loss'"),
    (EvaluatingMeanwhile, r"'b\.training'"),
    (Deleting, "'mask'"),
    (Swapping, r"'inner\.scale'"),
]


@pytest.mark.filterwarnings("ignore:forward leaves:pipert.SharedStateWarning")
@pytest.mark.parametrize("kind, name", SHARING, ids=[kind.__name__ for kind, _ in SHARING])
def test_an_attribute_overwritten_by_the_next_micro_batch_is_named(
    kind: type[nn.Module], name: str
) -> None:
    cut = "inner.b" if kind is Swapping else "b"
    with pipert.pipeline(kind(), cuts=[cut], chunks=4) as pipe:
        with pytest.warns(SharedStateWarning, match=f"sets [^;]*{name}.* of the model") as caught:
            pipe(torch.rand(8, 4))
        pipe(torch.rand(8, 4))  # once: here, a warning is an error
    assert len([each for each in caught if "before a cut" in str(each.message)]) == 1


def test_no_values_are_returned_if_warnings_are_errors() -> None:
    pipe = pipert.pipeline(KeepingAMask(), cuts=["b"], chunks=4)
    with pipe:
        for _ in range(3):
            with pytest.raises(SharedStateWarning) as caught:
                pipe.forward_backward(torch.rand(8, 4), target=torch.rand(8, 4), loss_fn=mse_loss)
            assert "micro-batch 1 of 4" in caught.value.__notes__[0]
        assert all(p.grad is None for p in pipe.parameters())


class KeepingInTraining(Two):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mask = x > 0
        return self.b(self.a(x))  # type: ignore[no-any-return]


def test_an_attribute_that_only_training_shares_is_named() -> None:
    with pipert.pipeline(KeepingInTraining().eval(), cuts=["b"], chunks=4) as pipe:
        pipe(torch.rand(8, 4))
        pipe.train()
        with pytest.warns(SharedStateWarning):
            pipe(torch.rand(8, 4))


class Grid(NamedTuple):
    height: Any
    width: Any


class KeepingWhatIsNotShared(Two):
    """Sets constant attributes, or sets and restores them before a cut, after it or by a hook."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():  # torch has another way, which keeps nothing
            warnings.simplefilter("ignore", FutureWarning)
            self.a = weight_norm(self.a)
        prune.random_unstructured(self.a, "bias", 0.5)  # type: ignore[no-untyped-call]
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.width, self.kind, self.shape = x.shape[1], x.dtype, x.shape[1:]
        self.grid, self.numbers = Grid(4, 4), (np.sqrt(4), np.int64(4), float("nan"))
        self.columns, self.rows, self.used = slice(4), range(4), frozenset((1, 2))
        if not self.cache:
            self.cache.append(torch.ones(4))
        self.b.eval()
        x = self.a(x)
        self.b.train()
        y = self.b(x)
        self.last = y.detach()
        return y * self.cache[0]  # type: ignore[no-any-return]


def test_attributes_that_are_not_shared_cause_no_warning() -> None:
    with pipert.pipeline(KeepingWhatIsNotShared(), cuts=["b"], chunks=4) as pipe:
        for _ in range(4):
            pipe(torch.rand(8, 4))
    with pipert.pipeline(KeepingAMask(), cuts=["b"], chunks=1) as pipe:
        pipe(torch.rand(8, 4))


class MeanwhileInTheFirst(nn.Module):
    """Runs the first micro-batch through partition 1 while the next one is inside ``a``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Step() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))  # type: ignore[no-any-return]


class Step(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.on_call: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for act in self.on_call:
            act(x)
        return super().forward(x)


def test_a_temporary_attribute_is_not_attributed_to_the_first_micro_batch() -> None:
    model = MeanwhileInTheFirst()
    is_set, first_is_gone = Event(), Event()

    def set_for_a_while(x: Tensor) -> None:
        if x[0, 0] != 0:  # of others than the first micro-batch
            model.a.scale = x
            is_set.set()
            assert first_is_gone.wait(10)
            del model.a.scale

    model.a.on_call.append(set_for_a_while)
    model.b.on_call.append(lambda x: is_set.wait(10))
    model.c.on_call.append(lambda x: first_is_gone.set())
    x = torch.arange(4.0)[:, None].expand(4, 4)
    with pipert.pipeline(model, cuts=["b", "c"], devices=["cpu"] * 3, chunks=4) as pipe:
        pipe(x)  # here, a warning is an error


class AskedForItsHash:
    def __hash__(self) -> int:
        return hash(str(self))  # in Python, so another thread may come in between

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError


class HookWithAName:
    name = np.zeros(2)

    def __call__(self, module: nn.Module, args: Any) -> None:
        pass


def test_values_that_cannot_be_compared_cause_no_warning() -> None:
    model: Any = KeepingAMask()
    model.register_forward_pre_hook(HookWithAName())
    model.table = OrderedDict((AskedForItsHash(), None) for _ in range(9))
    model.itself = []
    model.itself.append(model.itself)
    with pipert.pipeline(model, cuts=["b"], chunks=4) as pipe, pytest.warns(SharedStateWarning):
        pipe(torch.rand(8, 4))


class Kept(NamedTuple):
    mask: Tensor


class KeepingATuple(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = Kept(x > 0)
        return self.b(self.a(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::pipert.SharedStateWarning")
def test_the_comparison_keeps_no_tensor_alive() -> None:
    model = KeepingATuple()
    with pipert.pipeline(model, cuts=["b"], chunks=4) as pipe:
        pipe(torch.rand(8, 4))
        mask = weakref.ref(model.kept.mask)
        del model.kept
        gc.collect()
        assert mask() is None


class Storing(nn.Module):
    """A layer that keeps what it computes, as gates keep their losses."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layer, self.keeps = weight_norm(nn.Linear(4, 4)), keeps
        self.loss: Any = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.mean = y.detach().mean()
        if self.keeps:
            self.loss = [*self.loss[-1:], y.square().mean()]
        return y


def storing(kind: str, keeps: bool) -> tuple[Any, nn.Sequential]:
    layers = nn.Sequential(Storing(False), Storing(keeps))
    if kind == "Pipe":
        return pipert.Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2), layers
    return pipert.pipeline(layers, ["1"], devices=["cpu"] * 2, chunks=2), layers


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_a_tensor_with_a_graph_left_for_the_caller_is_named_once(kind: str) -> None:
    pipe, _ = storing(kind, keeps=True)
    with pipe, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", SharedStateWarning)
        for _ in range(2):
            pipe(torch.rand(4, 4))
    found = [str(each.message) for each in seen if "leaves" in str(each.message)]
    assert len(found) == 1 and "forward leaves '1.loss' on the model" in found[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_nothing_is_said_where_what_is_left_is_whole_or_has_no_graph(kind: str) -> None:
    pipe, layers = storing(kind, keeps=False)
    with pipe, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", SharedStateWarning)
        pipe(torch.rand(4, 4))  # whose layers keep a mean without a graph, and hooks a weight
        vars(layers[1])["keeps"] = True
        with torch.no_grad():
            pipe(torch.rand(4, 4))
        pipe.chunks = 1
        pipe(torch.rand(4, 4))
    assert not [each for each in seen if "leaves" in str(each.message)]
