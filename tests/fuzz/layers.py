"""Builds random models, of layers with three columns in and out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import Namespace, pop, skippable, stash
from tests.fuzz.case import Case
from tests.layers import Apply

__all__ = ["Fault", "Fragile", "Model", "build"]

RANDOM = ("dropout", "noise")


class Fault(Exception):
    """The exception that a fragile layer raises."""


class Scale(nn.Module):
    """Multiplies by a parameter, optionally in place."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(3) + 0.5)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.factor) if self.in_place else x * self.factor


class Times(torch.autograd.Function):
    """A linear layer, differentiated by hand, maybe without a gradient (docs/contract.md)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x.to(weight.dtype) @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if dy is None:
            return None, None
        x, weight = ctx.saved_tensors
        dy = dy.to(weight.dtype)
        return (dy @ weight).to(x.dtype), dy.t() @ x.to(weight.dtype)


class ByHand(nn.Linear):
    """Gives its weight to a function of its own: a view, as the weight may be tied."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Times.apply(  # type: ignore[no-untyped-call]
            x, self.weight.view_as(self.weight)
        )
        return y + self.bias


class Hands(Scale):
    """Returns its parameter beside the product with it."""

    def forward(self, x: Any) -> Any:
        return x * self.factor, self.factor, None, len(x)


class Ignores(Scale):
    """Ignores its input, except its length; the output depends only on the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.factor.expand(len(x), 3) * 2


class Several(nn.Module):
    """A first layer with several arguments: rows, a value for all rows, and nested integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x: Tensor, scale: Tensor, *, more: dict[str, Any]) -> Tensor:
        found: Tensor = self.table(more["ids"])
        return x * scale + found


class Raises(torch.autograd.Function):
    """An identity that calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.function()
        return grad, None


class Fragile(nn.Module):
    """Fails after ``left`` calls in the phase for which it was armed."""

    armed: str = ""
    left: int = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.armed:
            return x * 2
        self.touch("F")
        touched: Tensor = Raises.apply(  # type: ignore[no-untyped-call]
            x * 2, lambda: self.touch("B")
        )
        return touched

    def touch(self, phase: str) -> None:
        if phase == self.armed:
            self.left -= 1
            if self.left < 0:
                raise Fault(phase)


@skippable(stash=["skip"])
class Stash(Scale):
    """Stashes the product of its input and its parameter."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:  # type: ignore[override]
        yield stash("skip", (x * self.factor, self.factor, None))
        return x  # noqa: B901  the decorator expects such a generator


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds a term from the stashed values."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip[0] * skip[1]  # noqa: B901  the decorator expects such a generator


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


def largest(x: Tensor) -> Tensor:
    """Returns the place of the largest value in each row; of nearly equal ones, the first.

    A saturated ELU returns values that differ in the last bit.
    """
    return (x * 2**20).round().argmax(1)


# An in-place layer must not change a tensor that the layer before it has saved.
MAKERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [linear()],
    "linear, in place": lambda: [linear(), nn.ELU(inplace=True)],  # smooth: a kink under autocast
    # turns a difference in the last bit into one of the gradient.
    "linear, scale in place": lambda: [nn.Identity(), linear(), Scale(in_place=True)],
    "tanh": lambda: [nn.Tanh()],
    "scale": lambda: [Scale()],
    "layer norm": lambda: [nn.LayerNorm(3)],
    "dict": lambda: [
        Apply(lambda x: {"x": x, "others": (x * 2, None, {"how": "twice"})}),
        Apply(lambda value: value["x"] + value["others"][0]),
    ],
    "some cut": lambda: [
        Apply(lambda x: (x, x.detach(), largest(x))),
        Apply(lambda value: value[0] * value[1] + value[2][:, None]),
    ],
    "parameter": lambda: [Hands(), Apply(lambda value: value[0] * value[1])],
    "unused": lambda: [Apply(lambda x: (x.sigmoid(), x, x * 3)), Apply(lambda value: value[1])],
    "detach": lambda: [Apply(torch.detach)],
    "none": lambda: [Apply(lambda x: [None, (x,)]), Apply(lambda value: value[1][0] + 1)],
    "integers": lambda: [
        Apply(lambda x: (x, (x * 4 + 0.3).long(), x > 0.1)),  # seldom near a jump, unlike 0
        Apply(lambda value: torch.where(value[2], value[0], value[1])),
    ],
    "ignores": lambda: [Ignores()],
    "lengths": lambda: [  # a tensor that a layer keeps on the CPU on purpose
        Apply(lambda x: (x, torch.full((len(x), 1), 2.0, device="cpu"))),
        Apply(lambda value: value[0] * value[1].to(value[0].device)),
    ],
    "pipe": lambda: [nn.Sequential(linear(), linear())],
    "batch norm": lambda: [nn.BatchNorm1d(3)],
    "dropout": lambda: [nn.Dropout(0.4)],
    "noise": lambda: [Apply(lambda x: x + torch.rand_like(x))],
    "fragile": lambda: [Fragile()],
    "function": lambda: [ByHand(3, 3)],
}


class Model(NamedTuple):
    """The model of a case and its placement."""

    layers: nn.Sequential
    balance: list[int]
    devices: list[str]
    inner: list[Pipe]
    """The pipes among its layers, which have to be closed."""


def build(case: Case, piped: bool) -> Model:
    """Builds the model of a case; if not ``piped``, its inner pipes are plain Sequentials."""
    torch.manual_seed(case.seed)
    units = [MAKERS[name]() for name in case.units]
    for a, b in sorted(case.skips, reverse=True):
        first, last = sorted((a % (len(units) + 1), b % (len(units) + 1)))
        space = Namespace()
        stashing, popping = _isolated(Stash(), space), _isolated(Pop(), space)
        units = [*units[:first], [stashing], *units[first:last], [popping], *units[last:]]
    layers = [layer for unit in units for layer in unit]
    if case.several:
        layers.insert(0, Several())
        layers.append(Apply(lambda x: {"y": x, "top": largest(x), "none": None}))
    model = nn.Sequential(*layers).to(torch.float32 if case.autocast else torch.float64)
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if case.tied:
        for layer in linears[1:]:
            layer.weight = linears[0].weight
    _choose(case, model)
    cuts = sorted({1 + cut % max(1, len(layers) - 1) for cut in case.cuts} - {len(layers)})
    ends = [0, *cuts, len(layers)]
    balance = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    devices = [case.devices[j % len(case.devices)] for j in range(len(balance))]
    return Model(model, balance, devices, _nest(model, balance, devices) if piped else [])


def _nest(model: nn.Sequential, balance: list[int], devices: list[str]) -> list[Pipe]:
    """Replaces inner Sequentials by pipes on the device of their partition; returns the pipes."""
    home = [device for device, count in zip(devices, balance, strict=True) for _ in range(count)]
    inner = []
    for k, layer in enumerate(model):
        if type(layer) is nn.Sequential:
            pipe = Pipe(layer, [1, 1], devices=[home[k]] * 2, chunks=2)
            model[k] = pipe
            inner.append(pipe)
    return inner


def _isolated(layer: Any, space: Namespace) -> nn.Module:
    """Isolates a skippable layer in a namespace."""
    isolated: nn.Module = layer.isolate(space)
    return isolated


def _choose(case: Case, model: nn.Sequential) -> None:
    """Freezes some parameters and hooks others, except those that layers return as values."""
    handed = {id(layer.factor) for layer in model if isinstance(layer, Hands | Stash)}
    for k, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(k not in case.frozen)
        if k in case.hooked and parameter.requires_grad and id(parameter) not in handed:
            hooked: Any = parameter
            hooked.register_hook(_change)


def _change(grad: Tensor | None) -> Tensor | None:
    """A user's gradient hook, maybe called with ``None`` (docs/limits.md)."""
    return None if grad is None else grad.clamp(max=0.3) * 2
