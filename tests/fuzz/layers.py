"""The layers of random models: from three columns in double precision to as many."""

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
    """What a fragile layer raises."""


class Scale(nn.Module):
    """Multiplies by a parameter, in place where that is asked for."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(3) + 0.5)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.factor) if self.in_place else x * self.factor


class Hands(Scale):
    """Hands its parameter on, beside what it makes with it."""

    def forward(self, x: Any) -> Any:
        return x * self.factor, self.factor, None, len(x)


class Ignores(Scale):
    """Its output depends on nothing but its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.factor.expand(len(x), 3) * 2


class Several(nn.Module):
    """A first layer with several arguments: rows, a value for all of them, integers or none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x: Tensor, scale: Tensor, *, more: dict[str, Any]) -> Tensor:
        found: Tensor = self.table(more["ids"])
        return x * scale + found


class Raises(torch.autograd.Function):
    """Nothing; in the backward it calls a function."""

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
    """Fails when ``left`` calls, in the phase it was armed for, have passed."""

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
    """Puts aside what its own parameter makes of its input."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:  # type: ignore[override]
        yield stash("skip", (x * self.factor, self.factor, None))
        return x  # noqa: B901  what the decorator takes


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was put aside."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip[0] * skip[1]  # noqa: B901  what the decorator takes


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


# What an in-place layer changes must not be what the layer before it has saved.
MAKERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [linear()],
    "linear, in place": lambda: [linear(), nn.LeakyReLU(inplace=True)],
    "linear, scale in place": lambda: [nn.Identity(), linear(), Scale(in_place=True)],
    "tanh": lambda: [nn.Tanh()],
    "scale": lambda: [Scale()],
    "layer norm": lambda: [nn.LayerNorm(3)],
    "dict": lambda: [
        Apply(lambda x: {"x": x, "others": (x * 2, None, {"how": "twice"})}),
        Apply(lambda value: value["x"] + value["others"][0]),
    ],
    "some cut": lambda: [
        Apply(lambda x: (x, x.detach(), x.argmax(1))),
        Apply(lambda value: value[0] * value[1] + value[2][:, None]),
    ],
    "parameter": lambda: [Hands(), Apply(lambda value: value[0] * value[1])],
    "unused": lambda: [Apply(lambda x: (x.sigmoid(), x, x * 3)), Apply(lambda value: value[1])],
    "detach": lambda: [Apply(torch.detach)],
    "none": lambda: [Apply(lambda x: [None, (x,)]), Apply(lambda value: value[1][0] + 1)],
    "integers": lambda: [
        Apply(lambda x: (x, (x * 4).long(), x > 0)),
        Apply(lambda value: torch.where(value[2], value[0], value[1])),
    ],
    "ignores": lambda: [Ignores()],
    "lengths": lambda: [  # what a layer keeps on the CPU on purpose
        Apply(lambda x: (x, torch.full((len(x), 1), 2.0, device="cpu"))),
        Apply(lambda value: value[0] * value[1].to(value[0].device)),
    ],
    "pipe": lambda: [nn.Sequential(linear(), linear())],
    "batch norm": lambda: [nn.BatchNorm1d(3)],
    "dropout": lambda: [nn.Dropout(0.4)],
    "noise": lambda: [Apply(lambda x: x + torch.rand_like(x))],
    "fragile": lambda: [Fragile()],
}


class Model(NamedTuple):
    """What a case is about."""

    layers: nn.Sequential
    balance: list[int]
    devices: list[str]
    inner: list[Pipe]
    """The pipes in it, to be closed."""


def build(case: Case, piped: bool) -> Model:
    """The model of a case, its balance; what is an inner pipe is a Sequential if not ``piped``."""
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
        layers.append(Apply(lambda x: {"y": x, "top": x.argmax(1), "none": None}))
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
    """Put pipes in the place of Sequentials; each has to be where its partition is."""
    home = [device for device, count in zip(devices, balance, strict=True) for _ in range(count)]
    inner = []
    for k, layer in enumerate(model):
        if type(layer) is nn.Sequential:
            pipe = Pipe(layer, [1, 1], devices=[home[k]] * 2, chunks=2)
            model[k] = pipe
            inner.append(pipe)
    return inner


def _isolated(layer: Any, space: Namespace) -> nn.Module:
    """A skippable layer with a namespace of its own."""
    isolated: nn.Module = layer.isolate(space)
    return isolated


def _choose(case: Case, model: nn.Sequential) -> None:
    """Freeze some parameters, and hook others; not those that are handed on as values."""
    handed = {id(layer.factor) for layer in model if isinstance(layer, Hands | Stash)}
    for k, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(k not in case.frozen)
        if k in case.hooked and parameter.requires_grad and id(parameter) not in handed:
            hooked: Any = parameter
            hooked.register_hook(_change)


def _change(grad: Tensor | None) -> Tensor | None:
    """A user's hook; it may be called without a gradient (docs/contract.md, restrictions)."""
    return None if grad is None else grad.clamp(max=0.3) * 2
