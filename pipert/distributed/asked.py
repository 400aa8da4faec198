"""What is asked of a mini-batch, and what ranks bring to it, which must go together."""

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
from pipert.distributed.gradients import Tied
from pipert.layers.compiling import refuse_compilation
from pipert.layers.parametrized import compute_cached
from pipert.layers.random_numbers import next_seed
from pipert.stage.loss import LossFunction, check_step, scale_of
from pipert.workers.context import refuse_transforms

__all__: list[str] = []


class Site(NamedTuple):
    """Where the partitions of a pipe are."""

    control: Control
    group: dist.ProcessGroup
    """The pipeline."""
    homes: Sequence[int]
    """The rank of each partition."""
    ends: Sequence[tuple[int, int]]
    """Of each data-parallel replica, where among the ranks that agree are those of its first and
    last partition."""
    number: int
    """Of this replica."""
    device: torch.device


class Settings(NamedTuple):
    """A pipe's, for one mini-batch; the same on all ranks."""

    chunks: int
    checkpoint: str
    schedule: str
    deferred: bool


class Step(NamedTuple):
    """What ``forward_backward`` was asked for."""

    loss_fn: LossFunction
    target: Value
    reduction: str
    scale: float | Tensor | torch.amp.GradScaler | None
    keep_outputs: bool


class Brought(NamedTuple):
    """What a rank tells the others before a mini-batch."""

    settings: tuple[Any, ...]
    """What must be the same on all."""
    sizes: tuple[int, ...]
    """The rows of each micro-batch; the first rank's count."""
    looks: tuple[Any, ...]
    """What each looks like: those that are alike cross boundaries alike; likewise."""
    target_sizes: tuple[int, ...]
    """The rows of each micro-batch of the target, if it has any; the last rank's count."""
    parameters: int
    """Stands for the dtypes of this rank's and which require grad: what crosses depends on it."""
    shared: dict[int, bool]
    """Of the weights that this rank shares, by number, whether they require grad."""
    seed: int
    """Of the random numbers; the first rank's counts."""


def bring(
    site: Site,
    modules: Mapping[int, nn.Module],
    args: Any,
    kwargs: Any,
    settings: Settings,
    step: Step | None,
    tied: Sequence[Tied],
) -> tuple[Brought, Step | None, list[Value], list[Value]]:
    """What this rank brings, its step with the scale's value, and its inputs and targets."""
    refuse_compilation()
    refuse_transforms()
    compute_cached(modules.values())
    inputs: list[Value] = []
    targets: list[Value] = []
    sizes: list[int] = []
    rows: list[int] = []
    kind = "forward"
    if step is not None:
        check_step(step.loss_fn, step.reduction)
        scale = scale_of(step.scale, [site.device])
        # One on a GPU would have to be waited for.
        value = "on a GPU" if isinstance(scale, Tensor) and scale.is_cuda else float(scale)
        given = None if step.scale is None else value
        kind = f"forward_backward with reduction={step.reduction!r} and loss_scale={given}"
        step = step._replace(scale=scale)
    if 0 in modules:
        inputs, sizes = scatter_with_sizes(args, kwargs, settings.chunks)
    if step is not None and len(site.homes) - 1 in modules:
        targets, rows = scatter_with_sizes((step.target,), {}, settings.chunks)
        if not any(tensor.dim() for tensor in tensors_of(step.target)[0]):
            rows = []
    mode = "training" if any(m.training for m in modules.values()) else "evaluation"
    on = site.device.type
    autocast = torch.is_autocast_enabled(on) and torch.get_autocast_dtype(on)
    alike = kind, mode, f"autocast={autocast}", *settings
    looks = tuple(map(_look, inputs))
    parameters = hash(tuple([(p.dtype, p.requires_grad) for m in modules.values()
                             for p in m.parameters()]))  # fmt: skip
    shared = {one.number: one.parameter.requires_grad for one in tied}
    own = Brought(alike, tuple(sizes), looks, tuple(rows), parameters, shared, next_seed())
    return own, step, inputs, targets


def check(site: Site, brought: Sequence[Brought]) -> None:
    """Refuse on all ranks what does not go together."""
    site.control.require_same("call and settings", [one.settings for one in brought])
    numbers = {shared for one in brought for shared in one.shared}
    for number in numbers:
        if len({one.shared[number] for one in brought if number in one.shared}) > 1:
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


def _look(value: Value) -> Any:
    return tuple([(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors_of(value)[0]])
