"""Takes care of layers that depend on the whole mini-batch, above all of BatchNorm.

*Deferred batch normalisation* updates running statistics once per mini-batch; of other layers
whose micro-batches give something else there is a warning.

Each micro-batch is normalised by its own statistics, as in data parallelism (the footnote in
section 2 of the paper). By default each would also update the running statistics, so that a
mini-batch moves them ``m`` times, by statistics of fewer rows. The standard remedy
replaces the user's layer by one with buffers for the sums: this adds keys to the ``state_dict``,
a failed mini-batch leaves its sums behind, and several callers share them.

Here the layers are unchanged and the sums belong to the run:

1. In ``F[i,j]`` the normalisation function of a layer in training mode gets scratch buffers
   with momentum 1, which makes torch itself return mean and unbiased variance. They are recorded
   together with the number of values they summarise.
2. In ``R[i,j]`` nothing is recorded, and the buffers are put aside (``recompute/snapshot.py``).
3. When the call has succeeded, the records of all its micro-batches are pooled and the running
   statistics updated once, as ``nn.BatchNorm`` does with the whole mini-batch. When it fails, the
   records are dropped with the run.

A layer called several times in one forward is updated as often: once for the first calls in all
micro-batches together, then for the second calls, and so on.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._torch import BatchNorm, NormBase, forward_pre_hooks
from pipert.autograd.hooks import checkpoint_around
from pipert.batch.tensors import version
from pipert.errors import NestedCheckpointError, NotBatchFirstWarning, WholeBatchWarning
from pipert.layers.modules import check_initialised
from pipert.queues.process_lock import ProcessLock
from pipert.recompute.snapshot import original_of

_committing = ProcessLock()


def check_batch_norm(module: nn.Module, deferred: bool | None, stacklevel: int) -> None:
    """Refuse BatchNorm layers that cannot work in a pipe; warn of those of ``_WARNINGS``.

    Raises:
        ValueError: a parameter is not initialised.
        TypeError: ``module`` has a SyncBatchNorm, or a scripted BatchNorm that is to be deferred;
            or ``deferred`` is not a valid choice.
    """
    if deferred not in (None, True, False):
        raise TypeError(f"deferred_batch_norm must be True, False or None, got {deferred!r}")
    check_initialised(module)
    for name, layer in _modules(module):
        if deferred and isinstance(layer, torch.jit.ScriptModule) and hasattr(layer, "running_var"):
            raise TypeError(
                f"layer {name!r} is scripted and updates its running statistics where Python does "
                "not see it, so deferred_batch_norm=True cannot defer that; use the layer without "
                "torch.jit.script"
            )
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(
                f"layer {name!r} is a SyncBatchNorm, whose processes must all communicate in the "
                "same order; the concurrent workers of a pipe have none. Use "
                "BatchNorm, with deferred_batch_norm=True for running statistics of the whole "
                "mini-batch"
            )
    for kind, depends, text in _WARNINGS[deferred is not None :]:  # the first asks for a choice
        found = [f"{name!r}{why}" for name, layer in _modules(module) if (why := depends(layer))]
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            warnings.warn(text.format(", ".join(found[:3]) + more), kind, stacklevel)


def _modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its descendants by name, except pipes, which have their own setting."""
    if not getattr(module, "is_pipe", False):
        yield path, module
        for name, child in module.named_children():
            yield from _modules(child, f"{path}.{name}".lstrip("."))


class _Note(NamedTuple):
    """One micro-batch's statistics in one call of a layer."""

    rows: int
    """Number of values per channel."""
    mean: Tensor
    var: Tensor
    momentum: float


class _Call(NamedTuple):
    """The first, second or later call of a layer in the forward of all micro-batches."""

    mean: Tensor
    """The running mean."""
    var: Tensor
    """The running variance."""
    norm: BatchNorm | None
    """The layer that has these running statistics, if it is a BatchNorm."""
    notes: list[_Note]


class PartitionStats:
    """The statistics that one partition's layers computed in a run. Written by its worker only.

    Args:
        partition: has layers with buffers in training mode.
    """

    def __init__(self, partition: nn.Module) -> None:
        modules = {module for _, module in _modules(partition) if module.training}
        self.owners = {id(b): module for module in modules for b in module.buffers(recurse=False)}
        """The layers by their buffers."""
        self.calls: dict[tuple[int, int], _Call] = {}
        self._before = {norm: _running(norm) for norm in modules if isinstance(norm, BatchNorm)}

    def collecting(self) -> AbstractContextManager[object]:
        """Record the statistics of the micro-batch that is computed in the block."""
        return _Collect(self)

    def refuse_other_updates(self) -> None:
        """Refuse BatchNorm layers that have updated their statistics by functions of their own."""
        for norm, before in self._before.items():
            if _running(norm) != before:
                raise RuntimeError(
                    f"the BatchNorm layer {norm} computes its statistics by other functions than "
                    "torch.nn.functional.batch_norm or torch.batch_norm, so they cannot be "
                    "deferred; use deferred_batch_norm=False"
                )


def _running(norm: BatchNorm) -> list[tuple[int, int]]:
    """Returns what stands for the running statistics, and whether they have changed."""
    buffers = original_of(norm.running_mean), original_of(norm.running_var)
    return [(id(buffer), version(buffer)) for buffer in buffers if buffer is not None]


class _Collect(TorchFunctionMode):
    """A function mode that records the statistics of one task and leaves the buffers alone."""

    def __init__(self, stats: PartitionStats) -> None:
        super().__init__()
        self._stats = stats
        self._calls = Counter[int]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm or func is torch.batch_norm:
            names = _FUNCTIONAL if func is F.batch_norm else _TORCH
            return self._normalise(func, {**dict(zip(names, args, strict=False)), **kwargs})
        owner = self._stats.owners.get(id(args[0])) if args else None
        if isinstance(owner, BatchNorm) and args[0] is owner.num_batches_tracked:
            if func in _COUNTING:  # once for the mini-batch, at its end
                return args[0]
            if func is Tensor.__float__:  # for a momentum of None; this call counts already
                return func(*args) + 1.0
        return func(*args, **kwargs)

    def _normalise(self, func: Any, arguments: dict[str, Any]) -> Tensor:
        mean, var = arguments["running_mean"], arguments["running_var"]
        output: Tensor
        owner = self._stats.owners.get(id(mean))
        if owner is None or not arguments.get("training", False):
            output = func(**arguments)
            return output
        if not torch.compiler.is_dynamo_compiling() and checkpoint_around() is not None:
            raise NestedCheckpointError(
                "a layer used torch.utils.checkpoint around a BatchNorm whose running statistics "
                "are deferred; its recomputation would update them, too. Take it out of the layer "
                "and let the pipe checkpoint, with checkpoint='except_last' or 'always'"
            )
        x, momentum = arguments["input"], arguments.get("momentum", 0.1)
        rows = x.numel() // x.size(1)
        note = _Note(rows, torch.zeros_like(mean), torch.zeros_like(var), momentum)
        scratch = {"running_mean": note.mean, "running_var": note.var, "momentum": 1.0}
        output = func(**{**arguments, **scratch})
        norm = owner if isinstance(owner, BatchNorm) else None
        key = id(mean), self._calls[id(mean)]
        self._stats.calls.setdefault(key, _Call(mean, var, norm, [])).notes.append(note)
        self._calls[id(mean)] += 1
        return output


_FUNCTIONAL = tuple(inspect.signature(F.batch_norm).parameters)
_TORCH = (
    "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps",
    "cudnn_enabled",
)  # fmt: skip


# The functions by which a layer may count its calls, as in ``num_batches_tracked + 1``.
_COUNTING = (Tensor.add_, Tensor.add, Tensor.__add__, Tensor.__iadd__)


class DeferredStats:
    """The deferred statistics of one run. Made and committed by the caller."""

    def __init__(self, partitions: Sequence[nn.Module]) -> None:
        self.partitions = [
            PartitionStats(partition)
            if any(module.training and module._buffers for _, module in _modules(partition))
            else None
            for partition in partitions
        ]

    def commit(self) -> None:
        """Update the running statistics of all layers once, after the run has succeeded.

        Raises:
            RuntimeError: a layer's statistics cannot be deferred; nothing is updated here.
        """
        partitions = [partition for partition in self.partitions if partition is not None]
        for partition in partitions:
            partition.refuse_other_updates()
        with _committing.current:  # nothing here has a graph
            for partition in partitions:
                for call in partition.calls.values():
                    _update(*call)


def _update(mean: Tensor, var: Tensor, norm: BatchNorm | None, notes: list[_Note]) -> None:
    factor = notes[0].momentum
    if norm is not None and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    if not any(note.rows for note in notes):
        return
    for running, new in zip((mean, var), _pooled(notes), strict=True):
        # Through ``data``, so that the version stays, as with torch's kernel: a graph made earlier
        # in eval mode stays usable.
        running.data.lerp_(new.to(running.dtype), factor)


def _pooled(notes: Sequence[_Note]) -> tuple[Tensor, Tensor]:
    """Returns the mean and unbiased variance of all rows, without waiting for a GPU."""
    if len(notes) == 1:
        return notes[0].mean, notes[0].var
    total = sum(note.rows for note in notes)
    mean = torch.stack([note.mean.double() * (note.rows / total) for note in notes]).sum(0)
    squares = [
        note.var.double() * (note.rows - 1) + (note.mean - mean) ** 2 * note.rows for note in notes
    ]
    return mean, torch.stack(squares).sum(0) / (total - 1)


def _updates(layer: nn.Module) -> str:
    has_statistics = isinstance(layer, BatchNorm) and layer.running_mean is not None
    return " (in training mode)" if has_statistics and layer.training else ""


def _depends(layer: nn.Module) -> str:
    is_embedding = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    if is_embedding and layer.scale_grad_by_freq and layer.weight.requires_grad:
        return " (scale_grad_by_freq divides by the counts of its indices)"
    if isinstance(layer, NormBase) and not isinstance(layer, BatchNorm):
        is_updated = layer.training and layer.track_running_stats
        return " (track_running_stats updates its statistics)" if is_updated else ""
    # The parametrization is a module, the older kind of spectral norm a hook.
    parts = (layer, *forward_pre_hooks(layer).values()) if layer.training else ()
    iterates = any(hasattr(part, "n_power_iterations") for part in parts)
    return " (spectral norm iterates in each forward)" if iterates else ""


def _is_time_first(layer: nn.Module) -> str:
    has_time = isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and not layer.batch_first
    return " (batch_first=False)" if has_time else ""


_WARNINGS: tuple[tuple[type[Warning], Callable[[nn.Module], str], str], ...] = (
    (
        UserWarning, _updates,
        "the module has BatchNorm layers: {}. In a pipe each micro-batch is normalised by its own "
        "mean and variance, as in data parallelism, and each updates the running statistics. "
        "Choose deferred_batch_norm=True to update them once for each mini-batch, as without a "
        "pipe, or deferred_batch_norm=False to accept this",
    ),
    (
        WholeBatchWarning, _depends,
        "the module has layers that depend on the whole mini-batch: {}. In a pipe each does this "
        "for each micro-batch, so gradients, or what the layer keeps, are not those without a "
        "pipe. With chunks=1 they are; otherwise accept that, as data parallelism does, by "
        "ignoring pipert.WholeBatchWarning with warnings.filterwarnings",
    ),
    (
        NotBatchFirstWarning, _is_time_first,
        "the module has layers that take dimension 0 for time: {}. A pipe splits along dimension "
        "0, so each micro-batch would be a part of the sequence. Make them with batch_first=True, "
        "and pass rows in dimension 0. If a layer of your own transposes their input, all is well: "
        "ignore pipert.NotBatchFirstWarning",
    ),
)  # fmt: skip
"""Kinds of layers that are not in a pipe what they are without one: what a layer does, or ""."""
