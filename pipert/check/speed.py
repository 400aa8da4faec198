"""Measures how much faster a step of a pipe is than one of the plain module on one device.

The plain module takes the whole mini-batch on the first device, so it has the larger kernels. All
ways take turns, and the median of each counts. The ideal is that of ``n`` equal devices and free
copies: ``m * n / (m + n - 1)`` (section 2.1 of the paper).

Nothing here can be right or wrong: devices may differ, links be slow, the machine busy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter

from torch.nn.functional import mse_loss

from pipert.check.finding import REPORTED, Finding, Found, Measurement
from pipert.check.load import Load, timed
from pipert.check.ways import CALL, NEVER, Devices, Way, step

__all__: list[str] = []

PLAIN = "plain module"
ROUNDS = (3, 15)  # at least and at most


def check(devices: Devices, load: Load, seconds: float) -> Iterator[Found]:
    """Measures each way once a round, for about ``seconds``."""
    first = devices.partitions[0]
    model = load.model()
    plain, target = copy.deepcopy(model.layers).to(first), model.target.to(first)
    ways = [Way(CALL, "never"), Way(CALL, "except_last"), *NEVER[1:]]
    with devices.trial(model) as trial:
        steps: dict[str, Callable[[], object]] = {
            PLAIN: lambda: step(plain, trial.x, target, mse_loss),
            **{str(way): partial(trial.step, way) for way in ways},
        }
        taken = _take_turns(devices, steps, seconds)
    speed_ups = {name: median(taken[PLAIN]) / median(times) for name, times in taken.items()}
    rows = []
    for name, times in taken.items():
        figures = median(times), min(times), max(times)
        shown = (*(f"{1e3 * t:.1f}" for t in figures), f"{speed_ups[name]:.2f}")
        rows.append((name, *shown, _ideal(name, load, devices)))
    columns = ("step", "ms, median", "fastest", "slowest", "speed-up", "ideal")
    title = f"Speed-up over the plain module on {first}: {load}, {len(taken[PLAIN])} rounds"
    yield Measurement(title, columns, tuple(rows))
    best = max((name for name in taken if name != PLAIN), key=speed_ups.__getitem__)
    seen = f"{speed_ups[best]:.2f} over the plain module on {first}, at best: with {best}"
    yield Finding("speed-up", REPORTED, seen)


def _take_turns(
    devices: Devices, steps: dict[str, Callable[[], object]], seconds: float
) -> dict[str, list[float]]:
    """Returns the seconds of each step in each round."""
    started = perf_counter()
    for step_once in (*steps.values(), *steps.values()):  # to warm up
        timed(devices, step_once)
    round_seconds = (perf_counter() - started) / 2
    least, most = ROUNDS
    rounds = min(most, max(least, int(seconds / round_seconds)))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for k in range(rounds):
        for name in steps if k % 2 else reversed(steps):
            taken[name].append(timed(devices, steps[name]))
    return taken


def _ideal(name: str, load: Load, devices: Devices) -> str:
    """Returns the formula's value if it applies: no recomputation, one partition per device.

    It does not apply to ``loss.backward()`` on CPU, which runs all backwards in one thread.
    """
    in_one_thread = name.startswith(CALL) and len(devices.gpus) < devices.n
    if not name.endswith("'never'") or not devices.differ or in_one_thread:
        return "-"
    return f"{load.m * load.n / (load.m + load.n - 1):.2f}"
