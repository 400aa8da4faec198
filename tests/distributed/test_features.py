"""Tests that models of all kinds work over several ranks as in a ``pipert.Pipe`` of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipert
from pipert import distributed
from pipert.skip import pop, skippable, stash
from tests.distributed.launcher import run
from tests.distributed.own_models import Head


class Case(NamedTuple):
    """A model and its mini-batch."""

    model: nn.Sequential
    balance: list[int]
    args: tuple[Any, ...]
    target: Any
    loss_fn: Callable[[Any, Any], Any] = F.mse_loss
    reduction: str = "mean"
    denominator: Any = None
    scale: float | None = None
    deferred: bool | None = False
    kwargs: dict[str, Any] = {}


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@skippable(stash=["high"])
class Down(Up):
    def forward(self, x: Tensor) -> Any:
        yield stash("high", x)
        return F.relu(self.conv(x))


@skippable(pop=["high"])
class Join(Up):
    def forward(self, x: Tensor) -> Any:
        high = yield pop("high")
        return self.conv(x) + high


def u_net() -> Case:
    """Skips over all partitions, of which those between only pass one on."""
    inner = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), Down(), inner, nn.ReLU(), Join(), nn.Conv2d(4, 1, 1))
    return Case(model, [2, 1, 1, 2], (rows(6, 1, 5, 5),), rows(6, 1, 5, 5))


def early_skips() -> Case:
    """Skips that have ended before the last partition, and layers that get no skip there."""
    model = nn.Sequential(Down(), Join(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    return Case(model, [1, 1, 2, 1], (rows(6, 4, 5, 5),), rows(6, 1, 5, 5))


def tied() -> Case:
    """An embedding whose weight is the head's, on another rank."""
    embed = nn.Embedding(11, 8)
    model = nn.Sequential(embed, nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), Head(embed.weight))
    tokens = torch.randint(11, (6, 5))

    return Case(model, [1, 1, 1, 2], (tokens,), torch.randint(11, (6, 5)), _token_loss)


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def counted() -> Case:
    """A loss that is a mean over tokens, of which micro-batches have different numbers."""
    case = tied()
    target = case.target.clone()
    target[:3, 1:] = -100
    return case._replace(
        target=target, loss_fn=_sum_of_losses, denominator=(target != -100).sum()
    )


def _sum_of_losses(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def norms(deferred: bool) -> Case:
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8),
        nn.BatchNorm1d(8), nn.Linear(8, 2),
    )  # fmt: skip
    return Case(model, [2, 1, 2, 1], (rows(9, 3),), rows(9, 2), deferred=deferred)


def deferred_norms() -> Case:
    return norms(True)


def own_norms() -> Case:
    return norms(False)


class Tree(nn.Module):
    """Passes a tensor twice, a mask, a number and a list on, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "same": [y, "word"], "mask": mask, "scale": scale, "time": y.mT}


class Through(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        y = self.linear(value["y"]) * value["scale"] + value["time"].mT
        assert value["same"][0] is value["y"] and value["same"][1] == "word"
        assert value["mask"].dtype == torch.bool
        return {**value, "y": y, "same": [y, "word"]}


class Untree(nn.Module):
    def forward(self, value: dict[str, Any]) -> Tensor:
        y: Tensor = value["y"]
        return y.masked_fill(value["mask"], 0.0)


def trees() -> Case:
    mask = torch.rand(7, 3, 4) < 0.5
    model = nn.Sequential(Tree(), Through(), Through(), Untree())
    x = rows(7, 3, 4)
    return Case(model, [1, 1, 1, 1], (x, mask), rows(7, 3, 4), kwargs={"scale": 0.5})


def dropout() -> Case:
    model = nn.Sequential(
        nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)
    )
    return Case(model, [2, 1, 1, 1], (rows(8, 4),), rows(8, 4))


def frozen() -> Case:
    """The first layers need no gradient, so none goes back to the first rank, nor through it."""
    case = dropout()
    case.model[0].requires_grad_(False)
    return case


def frozen_last() -> Case:
    case = dropout()
    case.model[4].requires_grad_(False)
    return case


def inputs() -> Case:
    """An input that requires grad, in a graph of the caller's."""
    case = dropout()
    return case._replace(args=(case.args[0].requires_grad_(),))


def summed() -> Case:
    return dropout()._replace(reduction="sum", scale=16.0)


def time_first() -> Case:
    """Micro-batches differ in a dimension that is not the first behind the first layer."""
    model = nn.Sequential(Turn(), nn.Linear(4, 4), Turn(), nn.Linear(4, 4))
    return Case(model, [1, 1, 1, 1], (rows(7, 3, 4),), rows(7, 3, 4))


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Complex(nn.Module):
    """Returns complex numbers, of which some are conjugated without having been computed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(x, 2.0 * x)
        return z, (z + 1.0).conj()


class Real(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        z, conjugated = value
        return (z * z).real + conjugated.imag


def complex_numbers() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), Complex(), nn.Identity(), Real(), nn.Linear(4, 4))
    return Case(model, [2, 1, 1, 1], (rows(7, 4),), rows(7, 4))


class Tag:
    """An object that has no equality of its own."""

    def __init__(self, number: int) -> None:
        self.number = number


class Tagged(nn.Module):
    """Returns what is no tensor and is not equal to a copy, and a tensor of a small dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.tag = Tag(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tag, float, Tensor]:
        return x, self.tag, float("nan"), x.detach().to(torch.float8_e4m3fn)


class Untagged(nn.Module):
    def forward(self, value: tuple[Tensor, Tag, float, Tensor]) -> Tensor:
        x, tag, number, small = value
        assert number != number
        return x * tag.number + small.float()


def tagged() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), Tagged(), nn.Identity(), Untagged(), nn.Linear(4, 4))
    return Case(model, [2, 1, 1, 1], (rows(7, 4),), rows(7, 4))


class Numbered(nn.Linear):
    """Multiplies values and gradients by the number of their micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = times_number(super().forward(x))
        if y.requires_grad:
            y.register_hook(times_number)  # type: ignore[no-untyped-call]
        return y


def times_number(x: Tensor) -> Tensor:
    i = pipert.current_microbatch()
    assert i is not None
    return x * (i + 1)


def numbered() -> Case:
    """Layers, hooks and a loss that know their micro-batch."""
    model = nn.Sequential(*[Numbered(3, 3) for _ in range(4)])
    return Case(
        model, [1, 1, 1, 1], (rows(6, 3),), rows(6, 3),
        lambda y, target: times_number(F.mse_loss(y, target)),
    )  # fmt: skip


CASES = [
    u_net, tied, counted, deferred_norms, own_norms, trees, dropout, frozen, frozen_last, inputs,
    summed, time_first, complex_numbers,
    tagged, early_skips, numbered,
]  # fmt: skip


def made(case: Callable[[], Case]) -> Case:
    torch.manual_seed(1)
    return case()


def results(pipe: Any, case: Case, is_first: bool, is_last: bool) -> dict[str, Any]:
    """Takes two steps and an evaluation; returns their results."""
    torch.manual_seed(2 if is_first else 3)  # the first rank's numbers count
    losses = []
    for _ in range(2):
        args = case.args
        if is_first and args[0].requires_grad:
            args = (args[0] * 2.0,)
        loss, outputs = pipe.forward_backward(
            *(args if is_first else ()),
            **(case.kwargs if is_first else {}),
            loss_fn=case.loss_fn,
            target=case.target if is_last else None,
            reduction=case.reduction,
            denominator=case.denominator if is_last else None,
            loss_scale=case.scale,
            return_outputs=True,
        )
        losses.append(loss)
    after = torch.rand(())  # the generator is where it is in one process
    pipe.eval()
    with torch.no_grad():
        evaluated = pipe(*(case.args if is_first else ()), **(case.kwargs if is_first else {}))
    return {
        "losses": torch.stack(losses),
        "outputs": outputs,
        "evaluated": evaluated,
        "grads": {n: p.grad for n, p in pipe.named_parameters(remove_duplicate=False)},
        "buffers": {name: b.clone() for name, b in pipe.named_buffers()},
        "input": case.args[0].grad,
        "after": after,
    }


def on_rank(
    rank: int, case: Callable[[], Case], ranks: int, schedule: str, checkpoint: str
) -> dict[str, Any]:
    of_case = made(case)
    balance = of_case.balance
    if schedule == "1f1b" and ranks == 2:
        balance = [balance[0] + balance[1], balance[2] + balance[3]]
    pipe = distributed.Pipe(
        of_case.model, balance, chunks=3, schedule=schedule, checkpoint=checkpoint,
        deferred_batch_norm=of_case.deferred,
    )  # fmt: skip
    found = results(pipe, of_case, rank == 0, rank == ranks - 1)
    found["balance"] = balance
    return found


WAYS = [
    (2, "1f1b", "never"),
    (2, "interleaved", "always"),
    (4, "1f1b", "always"),
    (4, "gpipe", "never"),
]


def cases_and_ways() -> list[Any]:
    """Yields each case in each way, all but one only in the sweep."""
    return [
        pytest.param(case, *way, marks=[] if (k + number) % 4 == 0 else [pytest.mark.sweep])
        for k, case in enumerate(CASES)
        for number, way in enumerate(WAYS)
    ]


@pytest.mark.parametrize("case, ranks, schedule, checkpoint", cases_and_ways())
def test_features_work_as_in_one_process(
    case: Callable[[], Case], ranks: int, schedule: str, checkpoint: str
) -> None:
    found = run(ranks, on_rank, case, ranks, schedule, checkpoint)
    of_case = made(case)
    balance = found[0]["balance"]
    with pipert.Pipe(
        of_case.model, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=checkpoint,
        deferred_batch_norm=of_case.deferred,
    ) as pipe:  # fmt: skip
        expected = results(pipe, of_case, True, True)
    grads, buffers = {}, {}
    for one in found:
        torch.testing.assert_close(one["losses"], expected["losses"])
        buffers.update(one["buffers"])
        for name, grad in one["grads"].items():
            torch.testing.assert_close(grad, expected["grads"][name])
            grads[name] = grad
    assert set(grads) >= set(expected["grads"])
    torch.testing.assert_close(buffers, expected["buffers"])
    for what in ("outputs", "evaluated"):
        torch.testing.assert_close(found[-1][what], expected[what])
        assert all(one[what] is None for one in found[:-1])
    for what in ("input", "after"):
        torch.testing.assert_close(found[0][what], expected[what])
