"""Checks on all ranks that their settings, inputs and targets for a mini-batch fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.microbatch import scatter_with_sizes
from pipert.batch.tensors import tensors_of
from pipert.distributed.agreement import Control
from pipert.distributed.gradients import Tied, differ
from pipert.layers.compiling import refuse_compilation
from pipert.layers.parametrized import compute_cached
from pipert.layers.random_numbers import next_seed
from pipert.stage.loss import LossFunction, check_step, denominator_of, scale_of
from pipert.workers.context import refuse_transforms

__all__: list[str] = []


class Site(NamedTuple):
    """The place of this rank among those that train the model, and the place of each partition."""

    control: Control
    group: dist.ProcessGroup
    """The ranks of this pipeline."""
    homes: Sequence[int]
    """The rank of each partition."""
    ends: Sequence[tuple[int, int]]
    """For each data-parallel replica, the indexes within ``control`` of the ranks that have its
    first and its last partition."""
    number: int
    """The number of this rank's replica."""
    device: torch.device
    """This rank's device."""


class Settings(NamedTuple):
    """The settings of a pipe for one mini-batch; the same on all ranks."""

    chunks: int
    checkpoint: str
    schedule: str
    deferred: bool


class Step(NamedTuple):
    """The arguments of one call of ``forward_backward``."""

    loss_fn: LossFunction | None
    target: Value
    reduction: str
    denominator: float | Tensor | None
    scale: float | Tensor | torch.amp.GradScaler | None
    keep_outputs: bool


class Brought(NamedTuple):
    """A rank's report to the others before a mini-batch."""

    settings: tuple[Any, ...]
    """The settings that all ranks must have in common."""
    sizes: tuple[int, ...]
    """The number of rows in each micro-batch; only the first rank has any."""
    signatures: tuple[Any, ...]
    """Shapes, dtypes and ``requires_grad`` of each micro-batch; only the first rank has any.
    Micro-batches with equal signatures cross each boundary as tensors of equal shapes and
    dtypes."""
    target_sizes: tuple[int, ...]
    """The number of rows in each micro-batch of the target, if it has rows; only the last rank has
    any."""
    parameters: int
    """A hash of the dtypes and ``requires_grad`` of this rank's parameters, on which the tensors at
    the boundaries depend."""
    shared: dict[int, bool]
    """Whether each weight that this rank shares with others requires grad, by its number."""
    seed: int
    """The seed of the random numbers; the first rank's is used."""


def bring(
    site: Site,
    modules: Mapping[int, nn.Module],
    args: Any,
    kwargs: Any,
    settings: Settings,
    step: Step | None,
    tied: Sequence[Tied],
) -> tuple[Brought, Step | None, list[Value], list[Value]]:
    """Return this rank's report, the step with its scale's value, the inputs and the targets.

    The inputs and targets are of each micro-batch; the lists are empty on ranks that use none.
    """
    refuse_compilation()
    refuse_transforms()
    compute_cached(modules.values())
    inputs: list[Value] = []
    targets: list[Value] = []
    sizes: list[int] = []
    target_sizes: list[int] = []
    kind = "forward"
    if step is not None:
        loss_fn = check_step(step.loss_fn, step.reduction)
        scale = scale_of(step.scale, [site.device])
        # Reading a scale on a GPU would wait for the GPU.
        value = "on a GPU" if isinstance(scale, Tensor) and scale.is_cuda else float(scale)
        shown = None if step.scale is None else value
        kind = f"forward_backward with reduction={step.reduction!r} and loss_scale={shown}"
        given = step.denominator if len(site.homes) - 1 in modules else None
        denominator = denominator_of(given, [site.device])
        step = step._replace(loss_fn=loss_fn, denominator=denominator, scale=scale)
    if 0 in modules:
        inputs, sizes = scatter_with_sizes(args, kwargs, settings.chunks)
    if step is not None and len(site.homes) - 1 in modules:
        targets, target_sizes = scatter_with_sizes((step.target,), {}, settings.chunks)
        if not any(tensor.dim() for tensor in tensors_of(step.target)[0]):
            target_sizes = []
    mode = "training" if any(m.training for m in modules.values()) else "evaluation"
    device_type = site.device.type
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    in_common = kind, mode, f"autocast={autocast}", *settings
    signatures = tuple(map(_signature, inputs))
    parameters = hash(tuple([(p.dtype, p.requires_grad) for m in modules.values()
                             for p in m.parameters()]))  # fmt: skip
    shared = {one.number: one.parameter.requires_grad for one in tied}
    rows = tuple(sizes), signatures, tuple(target_sizes)
    return Brought(in_common, *rows, parameters, shared, next_seed()), step, inputs, targets


def check(site: Site, brought: Sequence[Brought]) -> None:
    """Raise on all ranks if their reports do not fit together."""
    site.control.require_same("call and settings", [one.settings for one in brought])
    if differ([one.shared for one in brought]):
        raise ValueError(
            "a weight that several ranks share must require grad on all of them or on none; "
            "call requires_grad_() of it on each"
        )
    counts = [len(brought[first].sizes) for first, _ in site.ends]
    if len(set(counts)) > 1:
        raise ValueError(
            "replicas must have as many micro-batches, but have "
            f"{' and '.join(map(str, counts))}; give each as many rows as the pipe has chunks, "
            "or leave the last batch out"
        )
    for first, last in site.ends:
        sizes, rows = brought[first].sizes, brought[last].target_sizes
        if rows and rows != sizes:
            raise ValueError(
                "arguments and target must have the same number of rows, but the arguments on "
                f"the first rank have {sum(sizes)} and the target on the last has {sum(rows)}"
            )


def _signature(value: Value) -> Any:
    return tuple([(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors_of(value)[0]])
