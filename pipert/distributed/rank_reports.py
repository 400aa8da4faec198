"""Validates that all ranks call with compatible arguments."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.microbatch import batch_of_step, ready, scatter_with_sizes
from pipert.batch.tensors import tensors_of
from pipert.batch.trees import ORDINARY, flatten
from pipert.distributed.rank_agreement import Agreement
from pipert.distributed.rank_boundary import Arrived, Parcel, pack, transfers
from pipert.layers.compiling import refuse_compilation
from pipert.layers.modules import compute_cached
from pipert.layers.random_numbers import next_seed
from pipert.stage.loss import (
    Loss,
    LossFunction,
    check_step,
    denominator_of,
    loss_of,
    scale_of,
)
from pipert.workers.context import refuse_transforms


class Site(NamedTuple):
    """The place of this rank among those that train the model, and the place of each partition."""

    agreement: Agreement
    group: dist.ProcessGroup
    """The ranks of this pipeline."""
    homes: Sequence[int]
    """The rank of each partition."""
    ends: Sequence[tuple[int, int]]
    """For each data-parallel replica, the indexes within ``agreement`` of the ranks that have its
    first and its last partition."""
    device: torch.device
    """This rank's device."""


class RankSettings(NamedTuple):
    """The settings of a pipe for one mini-batch; the same on all ranks."""

    chunks: int
    checkpoint: str
    schedule: str
    deferred: bool


class StepArguments(NamedTuple):
    """The arguments of one call of ``forward_backward``."""

    loss_fn: LossFunction | None
    target: Value
    reduction: str
    denominator: float | Tensor | None
    scale: float | Tensor | torch.amp.GradScaler | None
    keep_outputs: bool


class Inputs(NamedTuple):
    """The inputs of the micro-batches."""

    values: list[Value]
    sizes: Sequence[int]
    """The number of rows in each; 1 if they came ready."""
    parcel: Parcel | None
    """The same, as the first rank sends them to all others, if it does."""

    def for_all(self, device: torch.device, is_sent: bool) -> Inputs:
        """Return these inputs on a device, for all ranks, to which they may be sent.

        Raises:
            ValueError: an argument requires grad.
        """
        tensors, rebuild = tensors_of(self.values)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ValueError(
                "an argument requires grad, but all ranks use the arguments of any model, and no "
                "rank would have its whole gradient; compute it in the model, or pass its detach()"
            )
        values = rebuild(tuple([tensor.detach().to(device) for tensor in tensors]))
        return Inputs(values, self.sizes, pack(values, {}) if is_sent else None)

    def exchanged(self, site: Site, header: bytes) -> Arrived | None:
        """Send the first rank's inputs to all ranks of the pipeline; return them on the others."""
        tensors = self.parcel.tensors if self.parcel is not None else ()
        arrived = Arrived(header, site.device, tensors)
        with site.agreement.talking():
            for sent in transfers(dist.isend, arrived.tensors, site.homes[0], site.group):
                dist.broadcast(sent.tensor, site.homes[0], group=site.group)
        return arrived if self.parcel is None else None


class CallArguments(NamedTuple):
    """The arguments of one call, or micro-batches that are ready."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    microbatches: Iterable[Any] | None

    def split(self, chunks: int) -> Inputs:
        """Return the inputs of the micro-batches.

        Raises:
            TypeError, ValueError: as :meth:`pipert.Pipe.forward_backward`.
        """
        if self.microbatches is None:
            values, sizes = scatter_with_sizes(self.args, self.kwargs, chunks)
            return Inputs(values, sizes, None)
        batch = batch_of_step(self.args, self.kwargs, None, chunks, self.microbatches, True)
        return Inputs(batch.inputs, [1] * len(batch.inputs), None)


class RankReport(NamedTuple):
    """What a rank tells the others before a mini-batch."""

    in_common: tuple[Any, ...]
    """The call and the settings, which all ranks must have in common."""
    tied: dict[int, bool]
    """Whether each weight that this rank shares with others requires grad, by its number."""
    seed: int
    """The seed of the random numbers; the first rank's is used."""
    sizes: Sequence[int] = ()
    """The number of rows in each micro-batch, from the first rank."""
    target_sizes: Sequence[int] = ()
    """Likewise of the target, if it has rows, from the last rank."""
    checksum: tuple[int, int] = 0, 0
    """The first rank of this pipeline, and a checksum of arguments that must be equal there."""
    header: bytes = b""
    """What describes the arguments of all micro-batches, from a first rank that shares them."""


def prepare(
    site: Site,
    modules: Mapping[int, nn.Module],
    inputs_of: str,
    arguments: CallArguments,
    settings: RankSettings,
    step: StepArguments | None,
    tied: dict[int, bool],
) -> tuple[RankReport, Inputs, Callable[[Sequence[int]], Loss] | None]:
    """Check what this rank has for a mini-batch, and split it into micro-batches.

    Returns:
        The report; the input of each micro-batch, where this rank's count; and on the last one of a
        step what makes the loss, from the number of rows in each micro-batch.
    """
    refuse_compilation()
    refuse_transforms()
    compute_cached(modules.values())
    device, chunks = site.device, settings.chunks
    inputs, target_sizes, checksum = Inputs([], [], None), list[int](), 0
    if 0 in modules or inputs_of == "everywhere":
        inputs = arguments.split(chunks)
        if inputs_of == "everywhere":
            checksum = checksum_of(inputs.values)
        if inputs_of != "first":
            inputs = inputs.for_all(device, is_sent=inputs_of == "shared")
    kind, loss_of_sizes = "forward", None
    if step is not None:
        function, scale = check_step(step.loss_fn, step.reduction), scale_of(step.scale, [device])
        # Reading a scale on a GPU would wait for the GPU.
        value = "on a GPU" if isinstance(scale, Tensor) and scale.is_cuda else float(scale)
        shown = None if step.scale is None else value
        kind = f"forward_backward with reduction={step.reduction!r} and loss_scale={shown}"
    if step is not None and len(site.homes) - 1 in modules:
        denominator, reduction = denominator_of(step.denominator, [device]), step.reduction
        is_split = arguments.microbatches is None
        if is_split or step.target is None:
            targets, target_sizes = scatter_with_sizes((step.target,), {}, chunks)
            has_rows = any(tensor.dim() for tensor in tensors_of(step.target)[0])
        else:
            targets, has_rows = list(ready(step.target, "target")), True
            target_sizes = [1] * len(targets)
        target_sizes = target_sizes if has_rows else []

        def make_loss(sizes: Sequence[int]) -> Loss:
            each = targets if has_rows else targets[:1] * len(sizes)
            return loss_of(function, each, sizes, reduction, denominator, scale)

        loss_of_sizes = make_loss
    mode = "training" if any(m.training for m in modules.values()) else "evaluation"
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    is_ready = "micro-batches" if arguments.microbatches is not None else "arguments"
    in_common = kind, is_ready, mode, f"autocast={autocast}", *settings
    header = b"" if inputs.parcel is None else inputs.parcel.header
    of_inputs = site.homes[0], checksum
    report = RankReport(
        in_common, tied, next_seed(), inputs.sizes, target_sizes, of_inputs, header
    )
    return report, inputs, loss_of_sizes


def checksum_of(value: Value) -> int:
    """Return a checksum of a value: of the structure, and of some elements of tensors on CPU."""
    leaves, spec = flatten(value)
    found = zlib.crc32(str(spec).encode())
    for leaf in leaves:
        shown: Any = leaf if type(leaf) in ORDINARY else type(leaf)
        if isinstance(leaf, Tensor):
            shown = leaf.dtype, tuple(leaf.shape)
            if leaf.device.type == "cpu" and leaf.layout == torch.strided:
                some = leaf.detach().flatten()[:: 1 + leaf.numel() // 1024].contiguous()
                found = zlib.crc32(bytes(some.view(torch.uint8).tolist()), found)
        found = zlib.crc32(repr(shown).encode(), found)
    return found


def check(site: Site, reports: Sequence[RankReport]) -> None:
    """Raise on all ranks if their reports do not fit together."""
    site.agreement.require_same("call and settings", [one.in_common for one in reports])
    tied: dict[int, bool] = {}
    if any(tied.setdefault(*pair) != pair[1] for one in reports for pair in one.tied.items()):
        raise ValueError(
            "a weight that several ranks share must require grad on all of them or on none; "
            "call requires_grad_() of it on each"
        )
    inputs: dict[int, int] = {}
    if any(inputs.setdefault(*one.checksum) != one.checksum[1] for one in reports):
        raise ValueError(
            "with inputs='everywhere' all ranks must give the same arguments, but they differ "
            "between ranks; seed what loads and shuffles them alike, or take inputs='first'"
        )
    counts = [len(reports[first].sizes) for first, _ in site.ends]
    if len(set(counts)) > 1:
        raise ValueError(
            "replicas must have as many micro-batches, but have "
            f"{' and '.join(map(str, counts))}; give each as many rows as the pipe has chunks, "
            "or leave the last batch out"
        )
    for first, last in site.ends:
        sizes, rows = reports[first].sizes, reports[last].target_sizes
        if rows and rows != sizes:
            raise ValueError(
                "arguments and target must have the same number of rows, but the arguments on "
                f"the first rank have {sum(sizes)} and the target on the last has {sum(rows)}"
            )
