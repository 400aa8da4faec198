"""Validates that all ranks call with compatible arguments."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.microbatch import Batch, batch_of_step, ready, scatter_with_sizes
from pipert.batch.tensors import tensors_of
from pipert.batch.trees import ORDINARY, flatten
from pipert.distributed.rank_messages import Arrived, RankPlace, pack, transfers
from pipert.layers.compiling import refuse_tracers
from pipert.layers.modules import compute_cached
from pipert.layers.random_numbers import next_seed
from pipert.stage.loss import Loss
from pipert.stage.loss_checks import (
    LossChecks,
    StepCall,
    check_step,
    denominator_of,
    scale_of,
)


class RankSettings(NamedTuple):
    """The settings of a pipe for one mini-batch; the same on all ranks."""

    chunks: int
    checkpoint: str
    schedule: str
    deferred: bool


class RankReport(NamedTuple):
    """What a rank tells the others before a mini-batch."""

    in_common: tuple[Any, ...]
    """The call and the settings, which all ranks must have in common."""
    tied: dict[int, bool]
    """Whether each weight that this rank shares with others requires grad, by its number."""
    replica: Sequence[int]
    seed: int
    """The seed of the random numbers; the first rank's is used."""
    sizes: Sequence[int] = ()
    """The number of rows in each micro-batch, from the first rank."""
    target_sizes: Sequence[int] = ()
    """Likewise of the target, if it has rows, from the last rank."""
    checksum: int = 0
    """Of the arguments, where all ranks of this pipeline must give the same."""


def prepare(
    site: RankPlace,
    modules: Mapping[int, nn.Module],
    inputs_of: str,
    call: StepCall,
    is_step: bool,
    settings: RankSettings,
    tied: dict[int, bool],
    checks: LossChecks,
) -> tuple[RankReport, list[Value], Callable[[int, Sequence[int]], Loss] | None]:
    """Check what this rank has for a mini-batch, and split it into micro-batches.

    Returns:
        The report; the input of each micro-batch, where this rank's count; and on the last one of a
        step what makes the loss, from the number of micro-batches and of rows in each.
    """
    refuse_tracers()
    compute_cached(modules.values())
    device = site.device
    inputs: list[Value] = []
    sizes: Sequence[int] = ()
    target_sizes: Sequence[int] = ()
    kind, loss_of_sizes, checksum = "forward", None, 0
    if 0 in modules or inputs_of == "everywhere":
        batch = batch_of_step(call.args, call.kwargs, None, call.chunks, call.microbatches, True)
        inputs, sizes = batch.inputs, batch.sizes or [1] * len(batch.inputs)
        if inputs_of == "everywhere":
            checksum = checksum_of(inputs)
        if inputs_of != "first":
            inputs = _for_all(inputs, device)
    if is_step:
        function = check_step(call.loss_fn, call.reduction)
        scale = scale_of(call.loss_scale, device)
        # Reading a scale on a GPU would wait for the GPU.
        value = "on a GPU" if isinstance(scale, Tensor) and scale.is_cuda else float(scale)
        shown = None if call.loss_scale is None else value
        kind = f"forward_backward with reduction={call.reduction!r} and loss_scale={shown}"
        if len(site.homes) - 1 in modules:
            denominator = denominator_of(call.denominator, device)
            targets, target_sizes = _split_target(call)

            def make_loss(m: int, sizes: Sequence[int]) -> Loss:
                each = list(targets) if target_sizes else [targets[0]] * m
                watch = checks.of_step(call, Batch(each, each, sizes))
                return Loss(function, each, sizes, call.reduction, denominator, scale, watch)

            loss_of_sizes = make_loss
    mode = "training" if any(m.training for m in modules.values()) else "evaluation"
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    is_ready = "micro-batches" if call.microbatches is not None else "arguments"
    in_common = kind, is_ready, mode, f"autocast={autocast}", *settings
    told = tied, site.replica, next_seed(), sizes, target_sizes, checksum
    return RankReport(in_common, *told), inputs, loss_of_sizes


def _split_target(call: StepCall) -> tuple[Sequence[Value], Sequence[int]]:
    """Return the target of each micro-batch, and its rows; of none if one target is for all."""
    if call.microbatches is None or call.target is None:
        targets, sizes = scatter_with_sizes((call.target,), {}, call.chunks)
        return targets, sizes if any(x.dim() for x in tensors_of(call.target)[0]) else ()
    targets = list(ready(call.target, "target"))
    return targets, [1] * len(targets)


def _for_all(inputs: list[Value], device: torch.device) -> list[Value]:
    """Return the inputs of the micro-batches on a device, for all ranks.

    Raises:
        ValueError: an argument requires grad.
    """
    tensors, rebuild = tensors_of(inputs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "an argument requires grad, but all ranks use the arguments of any model, and no "
            "rank would have its whole gradient; compute it in the model, or pass its detach()"
        )
    found: list[Value] = rebuild(tuple([tensor.detach().to(device) for tensor in tensors]))
    return found


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


def share(site: RankPlace, inputs: list[Value]) -> Arrived | None:
    """Send the first rank's inputs to all ranks of its pipeline; return them on the others."""
    first = site.homes[0]
    with site.agreement.agreeing() as headers:
        parcel = pack(inputs)
        headers.append(parcel.header)
    is_here = first == dist.get_rank()
    header = site.agreement.of(first, headers)
    arrived = Arrived(header, site.device, parcel.tensors if is_here else ())
    with site.agreement.talking():
        for sent in transfers(dist.isend, arrived.tensors, first, site.group):
            dist.broadcast(sent.tensor, first, site.group)
    return None if is_here else arrived


def check(site: RankPlace, reports: Sequence[RankReport]) -> None:
    """Raise on all ranks if their reports do not fit together."""
    site.agreement.require_same("call and settings", [one.in_common for one in reports])
    tied: dict[int, bool] = {}
    if any(tied.setdefault(*pair) != pair[1] for one in reports for pair in one.tied.items()):
        raise ValueError(
            "a weight that several ranks share must require grad on all of them or on none; "
            "call requires_grad_() of it on each"
        )
    inputs: dict[Any, int] = {}
    if any(inputs.setdefault((*one.replica,), one.checksum) != one.checksum for one in reports):
        raise ValueError(
            "with inputs='everywhere' all ranks must give the same arguments, but they differ "
            "between ranks; seed what loads and shuffles them alike, or take inputs='first'"
        )
    rows = {(*one.replica,): one.sizes for one in reports if one.sizes}
    counts = list(map(len, rows.values()))
    if len(set(counts)) > 1:
        raise ValueError(
            "replicas must have as many micro-batches, but have "
            f"{' and '.join(map(str, counts))}; give each as many rows as the pipe has chunks, "
            "or leave the last batch out"
        )
    for one in reports:
        given, target = rows[*one.replica], one.target_sizes
        if target and target != given:
            raise ValueError(
                "arguments and target must have the same number of rows, but the arguments on "
                f"the first rank have {sum(given)} and the target on the last has {sum(target)}"
            )
