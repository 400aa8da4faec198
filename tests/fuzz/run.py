"""Runs a case in a pipe and in its reference."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe, pipeline
from tests.fuzz.case import Case, Step
from tests.fuzz.layers import RANDOM, Fault, Fragile, Model, build
from tests.fuzz.orders import schedule_of
from tests.fuzz.users import (
    GPUS,
    SCHEDULES,
    Batch,
    Found,
    allocate,
    batches,
    chunks_of,
    circumstances,
    clear_up,
    count_of,
    keep,
    loss_of,
    parts_of,
    rows_of,
    take,
)

__all__ = ["in_pipe", "reference"]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    parameters: list[Tensor] = [*module.parameters()]
    return torch.optim.SGD(parameters or [torch.zeros(1)], lr=0.01, momentum=0.5)


def in_pipe(case: Case, first: Found | None = None) -> Found:
    """Takes the steps with a pipe; returns the user's results. ``first`` has another pipe's.

    How far a failing step gets, and so the statistics that it leaves, depends on thread timing. So
    after such a step this pipe continues with the first pipe's statistics.
    """
    found = Found()
    model = build(case, piped=True)
    with contextlib.ExitStack() as stack:
        for inner in model.inner:
            stack.enter_context(inner)
        pipe = stack.enter_context(_pipe_of(case, model))
        optimizer = optimizer_of(pipe)
        left = batches(case, model.devices[-1])
        synchronize()
        torch.manual_seed(case.seed)
        for k, step in enumerate(case.steps):
            with circumstances(step):
                batch = left.pop(0)
                _step_of_pipe(case, k, pipe, batch, found)
                if first is not None and k in first.buffers:
                    fill(pipe, first.buffers[k])
                keep_gradients(found, pipe)
                clear_up(step, pipe, optimizer, batch)
                del batch
                if "drop" in step.then:
                    allocate()
        keep_state(found, pipe)
    synchronize()
    return found


def _pipe_of(case: Case, model: Model) -> Any:
    options: Any = {
        "devices": model.devices, "deferred_batch_norm": case.deferred, "timeout": 60,
    }  # fmt: skip
    if is_in_place(case):
        cuts = [str(k) for k in itertools.accumulate(model.balance[:-1])]
        return pipeline(model.layers, cuts, **options)
    return Pipe(model.layers, model.balance, **options)


def is_in_place(case: Case) -> bool:
    """Whether the pipe is one of any model: an ``nn.Sequential`` takes one value, and no skips.

    What works in place on its input, and pipes inside, are refused there (docs/contract.md).
    """
    refused = any("in place" in unit or unit == "pipe" for unit in case.units)
    return case.in_place and not case.several and not case.skips and not refused


def _step_of_pipe(case: Case, k: int, pipe: Any, batch: Batch, found: Found) -> None:
    step = case.steps[k]
    pipe.chunks, pipe.checkpoint = chunks_of(case, step), step.checkpoint
    pipe.train(step.training and step.how != "evaluation")

    def forward() -> Any:
        args, kwargs = batch.arguments(case, step)
        with precision(case):
            return pipe(*args, **kwargs)

    def before_backward() -> None:
        if step.late and step.x_on != str(pipe.devices[0]):
            batch.overwrite(target=False)

    schedule = schedule_of(case, step, pipe._workers)
    denominator = count_of(batch.target) if step.counts else None

    def whole() -> Tensor:
        args, kwargs = batch.arguments(case, step)
        target, loss_fn = batch.target, functools.partial(loss_of, batch.always)
        options: Any = {"loss_fn": loss_fn, "target": target}
        ready = step.ready and not case.several
        parts = parts_of(case, step)
        if step.function and is_in_place(case):
            args, options = ((*args, target),), {"step": _function(pipe.module, loss_fn)}
            if ready:
                args = ()
                options["microbatches"] = [
                    (*batch.arguments(case, step, part)[0], target[part]) for part in parts
                ]
        elif ready:
            args = ()
            options["target"] = [target[part] for part in parts]
            options["microbatches"] = [batch.arguments(case, step, part)[0] for part in parts]
        with precision(case):
            loss: Tensor = pipe.forward_backward(
                *args, schedule=schedule, reduction="sum", denominator=denominator,
                loss_scale=batch.loss_scale, **options, **kwargs,
            )  # fmt: skip
        return loss

    at_once = not set(case.units) & {"batch norm", *RANDOM}  # whose results depend on the order
    values = list(found.values)
    record = pipe.record() if step.recorded else contextlib.nullcontext()
    with armed(case, step, pipe), counted(case, step, pipe), record as seen:
        try:
            take(step, batch, found, forward, whole, before_backward, at_once)
        except Fault:
            # Whether a failed run has drawn random numbers, and so advanced the generator, depends
            # on which task came first.
            torch.manual_seed(case.seed + k)
            found.values = values
            pipe.zero_grad(set_to_none=True)
            found.buffers[k] = [buffer.clone() for buffer in pipe.buffers()]
    if seen is not None and k not in found.buffers:
        assert str(seen.report())


def _function(model: nn.Module, loss_fn: Any) -> Any:
    def function(microbatch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = microbatch
        y = model(x)
        loss: Tensor = loss_fn(y, target.to(y.device))
        return loss

    return function


def fill(module: nn.Module, buffers: list[Tensor]) -> None:
    """Copies these values to a module's buffers."""
    for buffer, kept in zip(module.buffers(), buffers, strict=True):
        buffer.data.copy_(kept.to(buffer.device))


@contextlib.contextmanager
def precision(case: Case) -> Iterator[None]:
    """Enables autocast if the case has it."""
    with (
        torch.autocast("cuda", torch.bfloat16, enabled=case.autocast and GPUS > 0),
        torch.autocast("cpu", torch.bfloat16, enabled=case.autocast),
    ):
        yield


@contextlib.contextmanager
def counted(case: Case, step: Step, pipe: Any) -> Iterator[None]:
    """Asserts that each layer runs once for each micro-batch, and once again where recomputed."""
    if not step.counted or step.fault is not None and "fragile" in case.units:
        yield
        return
    layers = dict(getattr(pipe, "module", pipe).named_children())
    calls: Counter[str] = Counter()
    handles = [
        layer.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        for name, layer in layers.items()
    ]
    yield
    for handle in handles:
        handle.remove()
    m = min(chunks_of(case, step), rows_of(case, step))
    whole = len(parts_of(case, step)) if step.ready and not case.several else m
    run = [whole if step.how in SCHEDULES else m]
    runs = {"two calls": [m, m], "two threads": [m, whole]}.get(step.how, run)
    backwards = {"no_grad": 0, "inference": 0, "evaluation": 0, "twice": 2}.get(step.how, 1)
    backwards *= step.checkpoint != "never"
    again = backwards * sum([each - (step.checkpoint == "except_last") for each in runs])
    # A gradient may not get there, or a pipe inside, which recomputes, may be all of a partition.
    may_differ = step.wants == "nothing" or {"detach", "ignores", "pipe"} & set(case.units)
    least, most = sum(runs) + (0 if may_differ else again), sum(runs) + again
    found = {name: calls[name] for name in layers}
    assert all([least <= n <= most for n in found.values()]), f"{least}..{most} calls: {found}"


@contextlib.contextmanager
def armed(case: Case, step: Step, module: nn.Module) -> Iterator[None]:
    """Makes the first fragile layer fail as the step says, in one of its first calls.

    In no later one, which the reference without recomputation would not have.
    """
    fragile = next((layer for layer in module.modules() if isinstance(layer, Fragile)), None)
    if fragile is None or step.fault is None:
        yield
        return
    fragile.armed, number = step.fault
    calls = min(chunks_of(case, step), step.rows)
    fragile.left = number % (min(calls, len(parts_of(case, step))) if step.ready else calls)
    try:
        yield
    finally:
        fragile.armed = ""


def reference(case: Case, found: Found) -> Found:
    """Takes the steps without the pipe, or as the module docstring says; returns the results."""
    if case.autocast or set(case.units) & set(RANDOM):
        steps = [dataclasses.replace(step, checkpoint="never") for step in case.steps]
        return in_pipe(dataclasses.replace(case, steps=tuple(steps)), found)
    expected = Found()
    plain = build(case, piped=False).layers
    optimizer = optimizer_of(plain)
    for k, (step, batch) in enumerate(zip(case.steps, batches(case, None), strict=True)):
        if k in found.buffers:
            plain.zero_grad(set_to_none=True)
            fill(plain, found.buffers[k])
        else:
            plain.train(step.training and step.how != "evaluation")
            forward = functools.partial(_forward, case, step, plain, batch)
            take(
                step, batch, expected, forward, functools.partial(_whole, step, forward, batch), int
            )
        keep_gradients(expected, plain)
        clear_up(step, plain, optimizer, batch)
    keep_state(expected, plain)
    return expected


def _whole(step: Step, forward: Any, batch: Batch) -> Tensor:
    loss: Any = loss_of(batch.always, forward(), batch.target)
    if step.counts:
        loss = loss / count_of(batch.target)
    (loss if batch.loss_scale is None else loss * batch.loss_scale).backward()
    return loss.detach()  # type: ignore[no-any-return]


def _forward(case: Case, step: Step, plain: nn.Sequential, batch: Batch) -> Any:
    """Computes the output for all rows, micro-batch by micro-batch if there is BatchNorm."""
    rows = range(len(batch.x))
    parts = [slice(0, len(rows))]
    if "batch norm" in case.units:
        split = torch.arange(len(rows)).tensor_split(chunks_of(case, step))
        parts = [slice(int(part[0]), int(part[-1]) + 1) for part in split]
    outputs = []
    with deferred_statistics(plain) if case.deferred else contextlib.nullcontext():
        for part in parts:
            args, kwargs = batch.arguments(case, step, part)
            first, *others = plain
            value = first(*args, **kwargs)
            for layer in others:
                value = layer(value)
            outputs.append(value)
    if case.several:
        y, top = (torch.cat([output[name] for output in outputs]) for name in ("y", "top"))
        return {"y": y, "top": top, "none": None}
    return torch.cat(outputs)


@contextlib.contextmanager
def deferred_statistics(plain: nn.Sequential) -> Iterator[None]:
    """Makes BatchNorm layers update their running statistics once, from all rows together."""
    norms = [norm for norm in plain if isinstance(norm, nn.BatchNorm1d) and norm.training]
    kept = [[buffer.clone() for buffer in norm.buffers()] for norm in norms]
    seen: list[list[Tensor]] = [[] for _ in norms]
    handles = [
        norm.register_forward_pre_hook(lambda _, args, seen=inputs: seen.append(args[0].detach()))
        for norm, inputs in zip(norms, seen, strict=True)
    ]
    yield
    for norm, buffers, inputs, handle in zip(norms, kept, seen, handles, strict=True):
        handle.remove()
        statistics = list(norm.buffers())
        for buffer, before in zip(statistics, buffers, strict=True):
            buffer.data.copy_(before)
        F.batch_norm(
            torch.cat(inputs), statistics[0].data, statistics[1].data, training=True,
            momentum=norm.momentum or 0.0,
        )  # fmt: skip
        statistics[2].data.add_(1)


def keep_gradients(found: Found, module: nn.Module) -> None:
    for k, parameter in enumerate(module.parameters()):
        keep(found, f"gradient of parameter {k}", parameter.grad)


def keep_state(found: Found, module: nn.Module) -> None:
    for k, tensor in enumerate([*module.parameters(), *module.buffers()]):
        keep(found, f"parameter or buffer {k} at the end", tensor.detach())


def synchronize() -> None:
    """Makes the host wait for all devices."""
    for device in range(GPUS):
        torch.cuda.synchronize(device)
