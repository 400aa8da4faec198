"""Predicts from the layers' costs the time and memory of a paper's setting on missing devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from _layer_costs import Bytes, Times, ranges, sum_by
from _memory import peaks
from _paper import Setting
from _simulator import Plan, Simulation, Transfer, checkpointed, simulate

from pipert.balance import balance_by_cost

__all__ = ["Link", "Prediction", "best_balance", "calibrated", "predict", "transfers"]

SGD = 2.0  # bytes of a parameter with its gradient, per byte of the parameter alone


@dataclass(frozen=True)
class Link:
    """A link between two devices: bytes per second, and extra seconds per copy."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one setting."""

    setting: Setting
    balance: tuple[int, ...]
    simulation: Simulation
    peaks: list[float]
    """Bytes on each device."""

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.setting.batch / self.simulation.seconds


def transfers(sizes: Bytes, balance: Sequence[int], samples: float) -> list[Transfer]:
    """Lists the transfers of one micro-batch between partitions: inputs and skips."""
    parts = ranges(balance)
    found = [
        Transfer(j - 1, j, round(samples * sizes.inputs[part.start]))
        for j, part in enumerate(parts)
        if j
    ]
    for skip in sizes.skips:
        source, target = (
            next(j for j, part in enumerate(parts) if k in part) for k in (skip.source, skip.target)
        )
        if source != target:
            found.append(Transfer(source, target, round(samples * skip.bytes)))
    return found


def best_balance(times: Times, setting: Setting) -> tuple[int, ...]:
    """Returns the balance whose slowest partition is fastest, counting recomputation."""
    again = checkpointed(setting.mode, setting.chunks) / setting.chunks
    costs = [(1 + again) * f + b for f, b in zip(times.forward, times.backward, strict=True)]
    return tuple(balance_by_cost(costs, setting.n))


def predict(
    setting: Setting,
    balance: Sequence[int],
    times: Times,
    sizes: Bytes,
    link: Link,
    *,
    speed: float = 1.0,
    copy_streams: bool = True,
    direct_skips: bool = True,
) -> Prediction:
    """Simulates a setting.

    Args:
        times: seconds of the layers.
        sizes: bytes of the layers.
        speed: how many times as fast the simulated devices are as the one ``times`` come from.
    """
    samples = setting.batch / setting.chunks
    forward, backward = (
        [samples / speed * seconds for seconds in sum_by(costs, balance)]
        for costs in (times.forward, times.backward)
    )
    plan = Plan(
        setting.chunks,
        len(balance),
        lambda i, j: forward[j],
        lambda i, j: forward[j],
        lambda i, j: backward[j],
        checkpointed(setting.mode, setting.chunks),
        transfers(sizes, balance, samples),
        bandwidth=link.bandwidth,
        latency=link.latency,
        copy_streams=copy_streams,
        direct_skips=direct_skips,
    )
    simulation = simulate(plan)
    return Prediction(
        setting, tuple(balance), simulation, peaks(simulation, sizes, balance, samples, SGD)
    )


def calibrated(
    setting: Setting, throughput: float, times: Times, sizes: Bytes, link: Link
) -> float:
    """Returns the speed at which a setting, with its best balance, reaches ``throughput``.

    Copies do not scale with the speed, so it is found iteratively.
    """
    speed, balance = 1.0, best_balance(times, setting)
    for _ in range(60):
        found = predict(setting, balance, times, sizes, link, speed=speed)
        too_slow = throughput / found.throughput
        if abs(too_slow - 1) < 1e-6:
            return speed
        speed *= too_slow
    raise ValueError(
        f"no device is fast enough for {throughput:.1f} samples/s in {setting.name!r}: the copies "
        "alone take longer; give a larger --bandwidth"
    )
