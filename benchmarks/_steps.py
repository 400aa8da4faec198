"""Measures real training steps: pipert and torchgpipe alternate over the same model.

pipert takes part twice: called, with ``loss.backward()``, and by ``forward_backward`` under 1F1B.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from _malloc import bytes_in_use, check_counter
from _measure import Row, cell, report, take_turns
from _models import Model, for_torchgpipe
from _paper import Setting
from torch import Tensor, nn
from torchgpipe import GPipe
from tqdm import tqdm

from pipert import Pipe
from pipert.balance import balance_by_time

__all__ = ["Runner", "by_autograd", "measured", "one_peak", "one_step"]

# On CPU: the most micro-batches, and the samples in each. Scales below a tenth use the tiny values.
CPU_CHUNKS, CPU_ROWS = 8, 2
TINY_CHUNKS, TINY_ROWS = 2, 1
MIB = 2**20

NAMES = ("pipert", "1f1b", "torchgpipe")


class Runner(NamedTuple):
    """A model, and a function that computes the gradients of its parameters for a mini-batch."""

    model: nn.Module
    differentiate: Callable[[Tensor], object]


def measured(
    title: str,
    pairs: Sequence[tuple[Model, Setting]],
    devices: Sequence[torch.device],
    scale: float,
    steps: int,
) -> list[dict[str, Any]]:
    """Measures the settings for which there are enough devices; prints and returns the figures."""
    found = []
    todo = [(model, setting) for model, setting in pairs if setting.n <= len(devices)]
    with tqdm(total=len(todo), desc="measuring steps", unit="setting", file=sys.stderr) as bar:
        for model, setting in todo:
            found.append(_measure(model, setting, devices[: setting.n], scale, steps))
            bar.update()
    table = []
    for figures in found:
        speeds = [figures.get(name, {}).get("throughput") for name in NAMES]
        peaks = [figures.get(name, {}).get("peak") for name in NAMES]
        *ours, peer = speeds
        ratios = [speed / peer if speed and peer else None for speed in ours]
        cells = [str(figures[key]) for key in ("setting", "batch", "m", "checkpoint")]
        cells += [cell(figure, 2) for figure in (*speeds, *ratios)]
        cells += [cell(peak and peak / MIB, 0) for peak in peaks]
        table.append(Row(tuple(cells)))
    columns = (
        *("setting", "batch", "m", "recomputed", "pipert, samples/s", "1f1b", "torchgpipe"),
        *("pipert / torchgpipe", "1f1b / torchgpipe", "pipert, MiB", "1f1b", "torchgpipe"),
    )
    report(f"{title}: measured on {', '.join(map(str, devices))}", columns, table)
    for figures in found:
        for name in NAMES:
            if figures.get(name, {}).get("failed"):
                print(f"{figures['setting']}, {name}: {figures[name]['failed']}", end="\n\n")
    return found


def _measure(
    model: Model, setting: Setting, devices: Sequence[torch.device], scale: float, steps: int
) -> dict[str, Any]:
    chunks, batch = setting.chunks, setting.batch
    if devices[0].type == "cpu":
        most, rows = (CPU_CHUNKS, CPU_ROWS) if scale >= 0.1 else (TINY_CHUNKS, TINY_ROWS)
        chunks = min(chunks, most)
        batch = rows * (chunks if setting.m else most)
    x = torch.rand(batch, *model.image(scale)).to(devices[0])
    about = {"setting": setting.name, "batch": batch, "m": chunks}
    figures: dict[str, Any] = {**about, "checkpoint": setting.mode}
    module = model.at_width(scale)
    balance = setting.balance or tuple(balance_by_time(setting.n, module, x[:CPU_ROWS].cpu()))
    counting = not check_counter(MIB) if devices[0].type == "cpu" else True
    with _runners(module, setting, balance, devices, chunks) as runners:
        # The first step, which also warms up.
        failed = {name: _failure(runner, x, devices) for name, runner in runners.items()}
        names = [name for name, why in failed.items() if not why]
        times = take_turns(
            lambda name: one_step(runners[name], x, devices), names, repeats=steps, warm_up=0
        )
        for name in runners:
            figures[name] = {"failed": failed[name]}
        for name in names:
            figures[name]["throughput"] = batch / median(times[name])
            figures[name]["peak"] = one_peak(runners[name], x, devices) if counting else None
    return figures


@contextmanager
def _runners(
    module: nn.Sequential,
    setting: Setting,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    chunks: int,
) -> Iterator[dict[str, Runner]]:
    """Yields both products over equal modules, or the plain module under the name of pipert."""
    if setting.m is None:
        yield {"pipert": by_autograd(module.to(devices[0]))}
        return
    converted = for_torchgpipe(deepcopy(module))
    mode = setting.checkpoint
    peer = GPipe(converted, list(balance), devices=list(devices), chunks=chunks, checkpoint=mode)
    with Pipe(
        module, balance, devices=devices, chunks=chunks, checkpoint=mode, deferred_batch_norm=False
    ) as pipe:
        of_schedule = partial(pipe.forward_backward, loss_fn=_loss, schedule="1f1b")
        yield {
            "pipert": by_autograd(pipe),
            "1f1b": Runner(pipe, of_schedule),
            "torchgpipe": by_autograd(peer),
        }


def by_autograd(model: nn.Module) -> Runner:
    """Returns a runner that calls ``model``, and ``backward`` on the loss."""
    return Runner(model, lambda x: torch.autograd.backward(_loss(model(x))))


def _loss(y: Tensor, _: object = None) -> Tensor:
    return y.square().mean()


def _failure(runner: Runner, x: Tensor, devices: Sequence[torch.device]) -> str:
    """Takes a step; returns why it failed, or an empty string."""
    try:
        one_step(runner, x, devices)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        gc.collect()
    return ""


def one_step(runner: Runner, x: Tensor, devices: Sequence[torch.device]) -> float:
    """Takes one training step with SGD, without loading data; returns its seconds."""
    begin = _now(devices)
    runner.differentiate(x)
    with torch.no_grad():
        for parameter in runner.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)
    runner.model.zero_grad(set_to_none=True)
    return _now(devices) - begin


def _now(devices: Sequence[torch.device]) -> float:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return perf_counter()


def one_peak(runner: Runner, x: Tensor, devices: Sequence[torch.device]) -> float:
    """Takes one step; returns the highest number of bytes on all devices together.

    It is the size of the parameters and the mini-batch plus the rise in memory during the step,
    because the other product holds memory too. On CPU the memory is read after each layer.
    """
    at_rest = float(x.nbytes + sum(parameter.nbytes for parameter in runner.model.parameters()))
    gc.collect()
    if devices[0].type == "cuda":
        distinct = set(devices)
        before = sum(map(torch.cuda.memory_allocated, distinct))
        for device in distinct:
            torch.cuda.reset_peak_memory_stats(device)
        one_step(runner, x, devices)
        return at_rest + sum(map(torch.cuda.max_memory_allocated, distinct)) - before
    readings: list[int] = []
    read: Callable[..., None] = lambda *_: readings.append(bytes_in_use())  # noqa: E731
    layers: list[nn.Module] = list(runner.model)  # type: ignore[call-overload]
    handles = [layer.register_forward_hook(read) for layer in layers]
    before = bytes_in_use()
    one_step(runner, x, devices)
    for handle in handles:
        handle.remove()
    return at_rest + max(readings) - before
