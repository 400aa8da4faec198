"""Deferred batch normalisation: running statistics once for each mini-batch.

Each micro-batch is normalised by its own statistics, as in data parallelism (the footnote in
section 2 of the paper). Left alone, each would also update the running statistics, so that a
mini-batch moves them ``m`` times, and by statistics of fewer rows. The standard way to defer that
is another layer in place of the user's, with buffers for the sums: then the ``state_dict`` has keys
of its own, a failed mini-batch leaves its sums behind, and several callers share them.

Here the layers stay as they are and the sums belong to the run:

1. In ``F[i,j]`` the normalisation function of a layer in training mode is given scratch buffers
   with momentum 1, which is how torch itself hands out mean and unbiased variance. They are noted
   together with how many values they are of.
2. In ``R[i,j]`` nothing is noted (``autograd.running_stats``).
3. When the call has succeeded, the notes of all micro-batches there were are pooled and the running
   statistics updated once, as ``nn.BatchNorm`` does with the whole mini-batch. When it fails, the
   notes go with the run.

A layer that is called several times in one forward is updated as often, the first calls of all
micro-batches together, then the second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pipert._typing import Value
from pipert.process_lock import ProcessLock

__all__: list[str] = []

_committing = ProcessLock()


def check_batch_norm(module: nn.Module, deferred: bool | None) -> None:
    """Refuse what cannot work in a pipe; warn if the user has not chosen what to do.

    Raises:
        TypeError: there is a SyncBatchNorm, or a scripted BatchNorm that is to be deferred.
    """
    for name, layer in _modules(module):
        if deferred and isinstance(layer, torch.jit.ScriptModule) and hasattr(layer, "running_var"):
            raise TypeError(
                f"layer {name!r} is scripted and updates its running statistics where Python does "
                "not see it, so that deferred_batch_norm=True cannot defer that; use it as it was "
                "before torch.jit.script"
            )
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(
                f"layer {name!r} is a SyncBatchNorm, whose processes must all communicate in the "
                "same order; the workers of a pipe run at the same time and have none. Use "
                "BatchNorm, with deferred_batch_norm=True for running statistics of the whole "
                "mini-batch"
            )
    names = [name for name, layer in _modules(module) if _is_updated(layer)]
    if names and deferred is None:
        warnings.warn(
            f"the module has BatchNorm layers in training mode ({_some(names)}). In a pipe each "
            "micro-batch is normalised by its own mean and variance, as in data parallelism, and "
            "each updates the running statistics. Choose deferred_batch_norm=True to update them "
            "once for each mini-batch, as without a pipe, or deferred_batch_norm=False to leave it "
            "at that",
            stacklevel=3,
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _is_updated(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None


def _modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and all that it contains, by name; but not pipes, which have their own setting."""
    if not getattr(module, "is_pipe", False):
        yield path, module
        for name, child in module.named_children():
            yield from _modules(child, f"{path}.{name}".lstrip("."))


class _Note(NamedTuple):
    """The statistics of one micro-batch in one call of a layer."""

    rows: int
    """Values for each channel."""
    mean: Tensor
    var: Tensor


class PartitionStats:
    """What the layers of one partition have noted in one run. Written by its worker alone.

    Args:
        norms: the layers that would update their running statistics.
    """

    def __init__(self, norms: Sequence[_BatchNorm]) -> None:
        self.by_mean = {id(norm.running_mean): norm for norm in norms}
        self.counters = {id(norm.num_batches_tracked) for norm in norms}
        self.notes: dict[tuple[int, int], list[_Note]] = {}

    def collect(self, compute: Callable[..., Value], *args: Any) -> Value:
        """``compute(*args)``, which is one micro-batch, with its statistics noted."""
        with _Collect(self):
            return compute(*args)

    def commit(self) -> None:
        """Update the running statistics."""
        for (mean, _), notes in self.notes.items():
            _update(self.by_mean[mean], notes)


class _Collect(TorchFunctionMode):
    """Notes what the layers compute in one task instead of letting them update anything."""

    def __init__(self, stats: PartitionStats) -> None:
        super().__init__()
        self._stats = stats
        self._calls: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if args and id(args[0]) in self._stats.counters:
            if func is Tensor.add_:
                return args[0]
            if func is Tensor.__float__:  # of a momentum of None; as if it had been counted
                return func(*args) + 1.0
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        layer = id(running_mean)
        if not training or running_mean is None or layer not in self._stats.by_mean:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        assert running_var is not None
        note = _Note(
            input.numel() // input.size(1),
            torch.zeros_like(running_mean),
            torch.zeros_like(running_var),
        )
        output = F.batch_norm(input, note.mean, note.var, weight, bias, True, 1.0, eps)
        call = self._calls[layer] = self._calls.get(layer, -1) + 1
        self._stats.notes.setdefault((layer, call), []).append(note)
        return output


class DeferredStats:
    """The running statistics of one run. Made and committed in the caller."""

    def __init__(self, partitions: Sequence[nn.Sequential]) -> None:
        self.partitions = [_stats_of(partition) for partition in partitions]

    def commit(self) -> None:
        """The run has succeeded: update the running statistics of all layers, once."""
        with _committing.current, torch.no_grad():
            for partition in self.partitions:
                if partition is not None:
                    partition.commit()


def _stats_of(partition: nn.Sequential) -> PartitionStats | None:
    modules = {module for _, module in _modules(partition)}
    norms = [m for m in modules if isinstance(m, _BatchNorm) and _is_updated(m)]
    return PartitionStats(norms) if norms else None


def _update(norm: _BatchNorm, notes: Sequence[_Note]) -> None:
    mean, var = _pooled(notes)
    factor = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    assert factor is not None and norm.running_mean is not None and norm.running_var is not None
    for running, new in ((norm.running_mean, mean), (norm.running_var, var)):
        # By way of data: torch's kernel does not count it as a modification either, so that a graph
        # made in eval mode before can still be used.
        running.data.lerp_(new.to(running.dtype), factor)


def _pooled(notes: Sequence[_Note]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of all rows together."""
    if len(notes) == 1:
        return notes[0].mean, notes[0].var
    means = torch.stack([note.mean.double() for note in notes])
    variances = torch.stack([note.var.double() for note in notes])
    rows = means.new_tensor([[note.rows] for note in notes])
    total = rows.sum()
    mean = (rows * means).sum(0) / total
    squares = (rows - 1) * variances + rows * (means - mean) ** 2
    return mean, squares.sum(0) / (total - 1)
