"""Tests layers that change no buffer in a recomputation, but use one that forwards changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe, RecomputationError, is_recomputing
from pipert.layers import fingerprints
from pipert.layers.snapshot import Snapshot

instance_norm: Any = F.instance_norm


class Codebook(nn.Module):
    """Uses a buffer and changes it, as vector quantisation with moving averages does."""

    def __init__(
        self,
        change: Callable[[Any, Tensor], Any],
        *,
        used: bool = True,
        careful: bool = True,
        first: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.book: Tensor
        self.register_buffer("book", torch.ones(3))
        self.change = change
        self.used = used
        self.careful = careful
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.move(x)
        y = x * self.weight * (self.book.clone() if self.used else 1)
        if not self.first:
            self.move(x)
        return y

    @torch.no_grad()
    def move(self, x: Tensor) -> None:
        if not (self.careful and is_recomputing()):
            self.change(self, x)


def replace(layer: Any, x: Tensor) -> None:
    layer.book = layer.book + x.mean(0)


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda layer, x: layer.book.lerp_(x.mean(0), 0.5),
    "data": lambda layer, x: layer.book.data.lerp_(x.mean(0), 0.5),
    "replaced": replace,
}
SCHEDULES = ["call", "gpipe", "1f1b"]
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def step(layer: nn.Module, schedule: str = "call", checkpoint: str = "always") -> Tensor:
    """Takes a step; returns the gradient of the first parameter."""
    x = torch.arange(12.0).view(4, 3)
    with Pipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint=checkpoint) as pipe:
        if schedule == "call":
            pipe(x).sum().backward()
        else:
            pipe.forward_backward(
                x, loss_fn=lambda y, _: y.sum(), schedule=schedule, reduction="sum"
            )
    grad = next(layer.parameters()).grad
    assert grad is not None
    return grad


@changes
@schedules
@pytest.mark.parametrize("first", [False, True], ids=["used first", "changed first"])
def test_a_recomputation_that_uses_a_buffer_which_has_changed_is_refused(
    change: Callable[..., Any], schedule: str, first: bool
) -> None:
    layer = Codebook(change, first=first)
    for _ in range(2):
        with pytest.raises(RecomputationError, match="uses its buffer '0.book' when it is recomp"):
            step(layer, schedule)
    step(layer, schedule, "never")


@changes
@schedules
def test_a_buffer_that_is_changed_and_not_used_may_be_left_alone(
    change: Callable[..., Any], schedule: str
) -> None:
    layer = Codebook(change, used=False)
    for _ in range(2):
        layer.weight.grad = None
        assert step(layer, schedule).tolist() == [18.0, 22.0, 26.0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer, x: layer.book.data.add_(1), "0.book"),
        (lambda layer, x: layer.book.numpy().__iadd__(1), "book"),
    ],
    ids=["data", "numpy"],
)
def test_a_change_that_moves_no_version_is_refused_in_a_recomputation(
    change: Callable[..., Any], name: str
) -> None:
    layer = Codebook(change, used=False, careful=False)
    with pytest.raises(RecomputationError, match=f"changes its buffer '{name}' when it is recomp"):
        step(layer)


def test_values_are_looked_at_until_the_first_recomputation_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, take = list[str](), fingerprints._taken
    monkeypatch.setattr(
        fingerprints, "_taken", lambda *args: (taken.append(args[1]), take(*args))[1]
    )
    layer = Codebook(lambda layer, x: None)
    step(layer)
    assert taken == ["book"] * 3  # before the forward, before the recomputation, and after it
    step(layer)
    step(layer.eval())
    assert len(taken) == 3


class Initialised(nn.Module):
    """Is initialised from the first rows it sees, like an ActNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.done: Tensor
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.weight.data.copy_(x[0])
            self.done.fill_(True)
        return x * self.weight


class Norm(nn.Module):
    """Has running statistics that torch does not know of; one of them has no number at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.mean: Tensor
        self.var: Tensor
        self.register_buffer("mean", torch.full((2,), torch.nan))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x * self.weight).unsqueeze(1).expand(-1, 2, -1)
        normed: Tensor = instance_norm(y, self.mean, self.var)
        return normed


class Constant(nn.Module):
    """Writes the same into its buffer each time, as an observer does that has seen enough."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale: Tensor
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.fill_(2)
        return x * self.weight * self.scale.clone()


def test_a_buffer_that_gets_the_same_values_is_used_again_in_every_step() -> None:
    layer, other = Constant(), Constant()
    for _ in range(3):
        torch.testing.assert_close(step(layer), step(other, checkpoint="never"))


@pytest.mark.parametrize("layer", [Initialised, Norm])
@schedules
def test_a_recomputation_with_the_same_result_is_not_refused(
    layer: type[nn.Module], schedule: str
) -> None:
    torch.testing.assert_close(step(layer(), schedule), step(layer(), schedule, "never"))


# In evaluation mode -------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def hooked(norm: nn.Module) -> nn.Module:
    norm.register_forward_hook(lambda *args: None)
    return norm


def changed_in_place(layer: nn.Module, name: str) -> None:
    layer.get_buffer(name).add_(1)


def replaced(layer: nn.Module, name: str) -> None:
    setattr(layer, name, layer.get_buffer(name) + 1)


@pytest.mark.parametrize("change", [changed_in_place, replaced])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Scaled, "scale"),
        (lambda: nn.BatchNorm1d(3), "running_mean"),
        (lambda: hooked(nn.BatchNorm1d(3)), "running_var"),
    ],
    ids=["scaled", "norm", "hooked norm"],
)
@pytest.mark.parametrize("trained", [False, True], ids=["alone", "beside a layer in training"])
def test_a_buffer_that_changes_before_its_recomputation_is_refused_in_evaluation_mode(
    trained: bool, make: Callable[[], nn.Module], name: str, change: Callable[..., None]
) -> None:
    layer = make().eval()
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.InstanceNorm1d(3, track_running_stats=trained))
    with Pipe(model, [3], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
        y = pipe(torch.randn(4, 3, 3))
        change(layer, name)
        with pytest.raises(RecomputationError, match=f"uses its buffer '.*{name}'"):
            y.sum().backward()
        pipe(torch.randn(4, 3, 3)).sum().backward()


@pytest.mark.parametrize(
    ("norm", "has"),
    [
        (nn.InstanceNorm1d(3), False),
        (nn.BatchNorm1d(3, track_running_stats=False), False),
        (nn.InstanceNorm1d(3, track_running_stats=True), True),
        (nn.BatchNorm1d(3), True),
    ],
    ids=str,
)
def test_a_normalisation_without_statistics_has_no_buffers_to_protect(
    norm: nn.Module, has: bool
) -> None:
    assert (Snapshot(nn.Sequential(nn.Linear(3, 3), norm)).buffers is not None) is has
