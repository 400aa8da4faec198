"""Provides ``pipert.distributed.Pipe``: an ``nn.Sequential`` split over several processes.

The engine is torch's: the stages and schedules of ``torch.distributed.pipelining``, and process
groups. This package adapts a model to it, so that values, losses and state keys are those of a
:class:`pipert.Pipe`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipert._typing import Device, Value
from pipert.distributed.rank_messages import RankPlace
from pipert.distributed.rank_parameters import SharedParameters, norm_of_all
from pipert.distributed.rank_run import RankParts, RankRuntime, RankSettings, Wrap
from pipert.distributed.rank_stage import StageModule, check_schedule
from pipert.layers.batchnorm import check_batch_norm
from pipert.model.settings import check_checkpoint, check_chunks
from pipert.model.split import (
    check_balance,
    check_module,
    refuse_shared_norms,
    sequential,
    split,
)
from pipert.observe.event import Observer
from pipert.observe.timeline import Timeline
from pipert.skip.declarations import keys_of, verify_skippables
from pipert.stage.loss import LossFunction, own_loss
from pipert.stage.loss_checks import StepCall
from pipert.status import Statistics

__all__ = ["Pipe"]


class RankPipe(nn.Module):
    """A model over the ranks of a process group: what all kinds of models have in common."""

    _runtime: RankRuntime
    _settings: RankSettings
    _elsewhere: set[str]
    """The keys of the plain module's state that other ranks have."""

    @property
    def chunks(self) -> int:
        """The number of micro-batches, at most. May be assigned between calls, on all ranks."""
        return self._settings.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._settings = self._settings._replace(chunks=check_chunks(chunks))

    def forward(self, *args: Any, **kwargs: Any) -> Value:
        """Run a mini-batch forward without a graph, for evaluation.

        Args:
            *args: as in :meth:`pipert.Pipe.forward`, on the first rank; ignored on others.
            **kwargs: likewise.

        Returns:
            The outputs on the last rank; ``None`` on others.

        Raises:
            RankError: another rank failed.
            Exception: as :meth:`pipert.Pipe.forward`.
        """
        return self._evaluated(args, kwargs, None)

    def _evaluated(self, args: Any, kwargs: Any, microbatches: Iterable[Any] | None) -> Value:
        chunks, _, schedule, _ = self._settings
        given = args, kwargs, own_loss, None, None, microbatches, chunks, schedule
        call = StepCall(*given, "mean", None, None, return_outputs=True)
        # Under inference_mode, tensors that cross would have no version.
        with torch.inference_mode(False), torch.no_grad():
            return self._runtime.run(call, False, self._settings)[1]

    def map(self, microbatches: Iterable[Any]) -> Iterator[Value]:
        """Run micro-batches as they come, ``chunks`` at a time; yield their outputs in order.

        All ranks call it together and exhaust it. Replicas have equally many micro-batches.

        Args:
            microbatches: as in :meth:`forward_backward`, read as needed.

        Yields:
            The outputs on the last rank; ``None`` on others.

        Raises:
            RankError: another rank failed.
            Exception: as :meth:`forward`.
        """
        site, left = self._runtime.site, iter(microbatches)
        while True:
            with site.agreement.agreeing("map()") as reports:
                some = list(islice(left, self.chunks))
                reports.append(len(some) if dist.get_rank() == site.homes[0] else None)
            count, *others = {each for each in reports if each is not None}
            if others:
                raise ValueError("replicas must map equally many micro-batches, but do not")
            if not count:
                return
            outputs = self._evaluated((), {}, some)
            yield from [None] * count if outputs is None else outputs

    def forward_backward(
        self,
        *args: Any,
        loss_fn: LossFunction | None = None,
        target: Value = None,
        microbatches: Iterable[Any] | None = None,
        reduction: str = "mean",
        denominator: float | Tensor | None = None,
        loss_scale: float | Tensor | torch.amp.GradScaler | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run a mini-batch forward and backward; add its gradients to this rank's ``.grad``.

        Gradients are added once all ranks have succeeded: a mini-batch that fails changes none.

        Args:
            *args: as in :meth:`pipert.Pipe.forward`, on the first rank; ignored on others.
            **kwargs: likewise.
            loss_fn, target, denominator: as in :meth:`pipert.Pipe.forward_backward`, on the last
                rank; targets and denominators of others are ignored.
            microbatches: as in :meth:`pipert.Pipe.forward_backward`, instead of arguments, where
                these count; on other ranks any list. ``target`` then has an entry for each.
            reduction, loss_scale: likewise; the same on all ranks.
            return_outputs: whether to return the outputs as well, on the last rank.

        Returns:
            The loss of the mini-batch on every rank, unscaled and without a graph; with
            ``return_outputs`` a pair of it and the outputs, which only the last rank has.

        Raises:
            RankError: another rank failed.
            Exception: as :meth:`pipert.Pipe.forward_backward`.
        """
        chunks, _, schedule, _ = self._settings
        checked: Any = loss_fn  # on each rank, before the first message
        given = args, kwargs, checked, None, target, microbatches, chunks, schedule
        call = StepCall(*given, reduction, denominator, loss_scale, return_outputs)
        loss, outputs = self._runtime.run(call, True, self._settings)
        return (loss, outputs) if return_outputs else loss

    def record(self) -> AbstractContextManager[Timeline]:
        """Record this rank's tasks in the block: for a picture or a trace, not for a report."""
        n, device = len(self._runtime.site.homes), self._runtime.site.device
        return self._runtime.trace.record([device] * n, [0] * n)

    def statistics(self) -> Statistics:
        """Return this rank's counts of runs, as :meth:`pipert.Pipe.statistics` does."""
        return self._runtime.trace.statistics()

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` about this rank's runs and tasks from now on."""
        self._runtime.trace.add_observer(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop telling ``observer``."""
        self._runtime.trace.remove_observer(observer)

    def train(self, mode: bool = True) -> Self:
        """As in ``nn.Module``."""
        super().train(mode)
        for part in self._runtime.wrapped.values():
            part.train(mode)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in ``nn.Module``; from the whole model's state it takes this rank's part.

        Raises:
            ValueError: ``assign`` is true, which would replace the parameters that ranks share.
        """
        if assign:
            raise ValueError(
                "assign=True cannot replace the parameters of a model over ranks; leave it out, so "
                "that values are copied"
            )
        own = {name: v for name, v in state_dict.items() if name not in self._elsewhere}
        return super().load_state_dict(own, strict)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients on all ranks of the pipeline, which all call it.

        A parameter that several ranks share counts once. To clip:
        ``clip_grads_with_norm_(pipe.parameters(), max_norm, pipe.grad_norm())``.

        Raises:
            ValueError: ``norm_type`` is not positive, or differs between ranks.
            RankError: another rank failed.
        """
        copies = {tied.parameter for tied in self._runtime.tied if not tied.is_first}
        grads = [p.grad for p in self.parameters() if p.grad is not None and p not in copies]
        return norm_of_all(grads, norm_type, self._runtime.site)

    def extra_repr(self) -> str:
        """Say which partitions are here."""
        here, site = list(self._runtime.parts.modules), self._runtime.site
        return f"partitions {here} of {len(site.homes)}, on {site.device}"


class Pipe(RankPipe):
    """An ``nn.Sequential`` split over the ranks of a process group, a partition on each.

    All ranks make it of the same model with the same arguments, and call it together. Each keeps
    its own partition, under the plain module's names, so ``parameters()`` and ``state_dict()``
    return this rank's part.

    >>> pipe = pipert.distributed.Pipe(module, balance, chunks=4)  # doctest: +SKIP
    >>> loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)  # doctest: +SKIP

    Args:
        module: the layers, skippable ones included. Only this rank's layers move to its device, so
            build them on CPU, or on the meta device: then this rank's get memory without values,
            to load a checkpoint into.
        balance: the number of layers in each partition, in order; one entry for each rank, or with
            ``'interleaved'`` a multiple, whose partitions go round the ranks.
        mesh: the ranks, with one dimension, or two: the pipeline's and the data-parallel one's,
            whose replicas must have equally many micro-batches. Default: all ranks, one pipeline.
        device: this rank's. Default: on a CUDA mesh the CUDA device numbered ``LOCAL_RANK``, or
            the current one; else ``'cpu'``.
        chunks: the number of micro-batches, at most; default 1.
        schedule: ``'1f1b'`` (default), ``'gpipe'`` or ``'interleaved'``.
        checkpoint: as in :class:`pipert.Pipe`. Default: ``'never'``, but ``'except_last'`` with
            ``'gpipe'``.
        deferred_batch_norm: as in :class:`pipert.Pipe`.
        wrap: called with each partition of this rank, an ``nn.Sequential`` on its device; returns
            the module to run in its place, such as a ``DistributedDataParallel`` of it, or
            ``None`` if it changed the partition in place, as ``fully_shard`` does.

    Raises:
        ValueError, TypeError: as :class:`pipert.Pipe`; or the ranks were given different arguments,
            or the schedule does not fit the balance.
        RankError: another rank failed.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        device: Device | None = None,
        chunks: int = 1,
        schedule: str = "1f1b",
        checkpoint: str | None = None,
        deferred_batch_norm: bool | None = None,
        wrap: Wrap | None = None,
    ) -> None:
        super().__init__()
        site = RankPlace(mesh, device)
        with site.agreement.agreeing() as layouts:
            check_module(module)
            verify_skippables(module)
            balance = check_balance(module, balance)
            check_batch_norm(module, deferred_batch_norm, stacklevel=3)
            given = chunks, schedule, checkpoint, deferred_batch_norm
            self._settings = check_settings(*given, len(balance), site)
            parts = parts_of(module, balance, site)
            layouts.append((balance, self._settings, layout_of(module)))
        site.agreement.require_same("arguments and layers", layouts)
        for part in parts.modules.values():
            self._modules.update(part._modules)
        self.training = module.training
        self._elsewhere = module.state_dict().keys() - self.state_dict().keys()
        self._runtime = RankRuntime(site, parts, wrap)

    @property
    def partitions(self) -> tuple[nn.Sequential, ...]:
        """The partitions of this rank."""
        return tuple(self._runtime.parts.modules.values())


def check_settings(
    chunks: int, schedule: str, checkpoint: str | None, deferred: bool | None, n: int,
    site: RankPlace,
) -> RankSettings:  # fmt: skip
    """Check the settings of a pipe, fill in defaults, and place ``n`` partitions on the ranks."""
    default = "except_last" if schedule == "gpipe" else "never"
    chosen = check_checkpoint(checkpoint) or default
    assert isinstance(chosen, str)
    name = check_schedule(schedule, n, len(site.ranks))
    site.homes = [site.ranks[j % len(site.ranks)] for j in range(n)]
    return RankSettings(check_chunks(chunks), chosen, name, bool(deferred))


def parts_of(module: nn.Sequential, balance: list[int], site: RankPlace) -> RankParts:
    """Split a model, and move only this rank's partitions to its device."""
    counts = Counter(p for home in module.modules() for p in home._parameters.values())
    if any(count > 1 and p is not None and p.is_meta for p, count in counts.items()):
        raise ValueError(
            "parameters that several layers share cannot be on the meta device, where each layer "
            "would get others; build the model on CPU"
        )
    partitions = split(module, balance)
    uses: dict[nn.Parameter, set[int]] = {}
    for j, partition in enumerate(partitions):
        for parameter in partition.parameters():
            uses.setdefault(parameter, set()).add(j)
    refuse_shared_norms([part.modules() for part in partitions], site.homes)
    modules = {j: _placed(partitions[j], site.device) for j in site.own}
    numbers = {key: number for number, key in enumerate(keys_of(module))}
    skips = [{numbers[key]: key for key in keys_of(part)} for part in partitions]
    return RankParts(None, modules, skips, shared_of(uses, site.homes))


def shared_of(
    uses: Mapping[nn.Parameter, Iterable[int]], homes: Sequence[int]
) -> SharedParameters:
    """Return the parameters whose partitions are on several ranks, from those that use each."""
    having = [(p, sorted({homes[j] for j in used})) for p, used in uses.items()]
    return [pair for pair in having if len(pair[1]) > 1]


def layout_of(module: nn.Module) -> int:
    """Return a checksum of the names, shapes and dtypes of all parameters."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    return zlib.crc32(str(shapes).encode())


def _placed(partition: nn.Sequential, device: torch.device) -> Any:
    def place(tensor: Tensor) -> Tensor:
        on_meta = tensor.is_meta
        return torch.empty_like(tensor, device=device) if on_meta else tensor.to(device)

    partition._apply(place)  # type: ignore[no-untyped-call]
    module: Any = sequential(partition._modules, partition.training, StageModule)
    return module
