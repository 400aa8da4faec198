"""Builds the model to soak: layers that misbehave on demand, a skip, a pipe inside a pipe.

``Soaked`` holds the pipe and the plain module to compare it with. One function makes the layers of
both; those of the pipe ask a ``Demand`` at each call whether to misbehave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from pipert.skip import pop, skippable, stash

__all__ = ["STATIONS", "WIDTH", "Demand", "Late", "Soaked"]

WIDTH = 8
STATIONS = 5


class Demand:
    """An action that one call of one station has to carry out before its work, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._action: Callable[[], object] | None = None
        self._station = self._calls = 0
        self._recomputing = False

    def make(
        self,
        station: int,
        action: Callable[[], object],
        *,
        after: int = 0,
        recomputing: bool = False,
    ) -> None:
        """Demands the action of a station's call number ``after``, recomputing or not."""
        with self._lock:
            self._action, self._station = action, station
            self._calls, self._recomputing = after, recomputing

    def withdraw(self) -> bool:
        """Cancels the demand; returns whether it was still unmet."""
        with self._lock:
            action, self._action = self._action, None
            return action is not None

    def meet(self, station: int) -> None:
        """Carries out the demanded action if this call of a station is the one meant."""
        with self._lock:
            if self._action is None or station != self._station:
                return
            if is_recomputing() != self._recomputing:
                return
            self._calls -= 1
            if self._calls >= 0:
                return
            action, self._action = self._action, None
        action()


class Late:
    """An action that lasts until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._gate = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._gate.wait(60), "nobody let the layer go"

    def let_go(self) -> None:
        self._gate.set()


class Station(nn.Module):
    """The ``k``-th layer with parameters of its model."""

    def __init__(self, k: int, demand: Demand) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.demand = demand
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        self.demand.meet(self.k)
        y: Tensor = self.linear(x.tanh())  # the result is not saved: the next may be in place
        return y


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes half of its input."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x * 0.5)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Pops the stashed tensor, and returns it in a dict with its input."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return {"x": x, "skip": skip, "name": "soak"}


class Sum(nn.Module):
    """Adds the two tensors of the dict."""

    def forward(self, value: dict[str, Any]) -> Tensor:
        total: Tensor = value["x"] + value["skip"]
        return total


def layers(demand: Demand, wrap: Callable[[nn.Sequential], nn.Module]) -> nn.Sequential:
    """Builds eight layers; one of them contains two of the stations."""
    one, two, three, four, five = (Station(k, demand) for k in range(STATIONS))
    inner = wrap(nn.Sequential(two, three))
    return nn.Sequential(one, Stash(), inner, nn.ReLU(inplace=True), four, Pop(), Sum(), five)


def norm_layers() -> nn.Sequential:
    """Builds layers with running statistics."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


class Soaked:
    """A pipe that contains another, a pipe with running statistics, and their plain modules."""

    BALANCES = ([3, 3, 2], [3, 2, 3], [4, 2, 2], [5, 2, 1])  # the inner pipe stays on its device

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = list(devices)
        self.demand = Demand()
        self.inner: list[Pipe] = []
        self.plain = layers(Demand(), lambda inner: inner)
        self.module = layers(self.demand, self._wrap)
        self.pipe = self._make(0)
        norm, self.plain_norm = norm_layers(), norm_layers()
        ends = [self.devices[0], self.devices[-1]]
        self.norm = Pipe(norm, [1, 2], devices=ends, chunks=3, deferred_batch_norm=True)
        self.learn()

    def _wrap(self, inner: nn.Sequential) -> Pipe:
        # On the device of the partition that contains it: a pipe cannot be moved.
        devices = [self.devices[0]] * 2
        self.inner.append(Pipe(inner, [1, 1], devices=devices, chunks=2, checkpoint="always"))
        return self.inner[-1]

    def _make(self, which: int) -> Pipe:
        balance = self.BALANCES[which % len(self.BALANCES)]
        return Pipe(self.module, balance, devices=self.devices, chunks=4)

    def make_again(self, which: int) -> None:
        """Replaces the pipe by a new one over the same layers, which may move."""
        self.pipe = self._make(which)

    def learn(self) -> None:
        """Copies the pipes' parameters and buffers to the plain modules."""
        self.plain.load_state_dict(self.pipe.state_dict())
        self.plain_norm.load_state_dict(self.norm.state_dict())

    def forget_gradients(self) -> None:
        for module in (self.pipe, self.plain, self.norm, self.plain_norm):
            module.zero_grad(set_to_none=True)

    def pipes(self) -> list[Pipe]:
        return [self.pipe, self.norm, *self.inner]

    def workers(self) -> list[threading.Thread]:
        """Returns the threads of all pipes of the process, which each start at a first call."""
        return [t for t in threading.enumerate() if t.name.startswith("pipert-")]

    def close(self) -> None:
        for pipe in self.pipes():
            pipe.close(timeout=60)
