"""Provides ``pipert.distributed.pipeline``: any ``nn.Module`` over several processes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from pipert._typing import Device
from pipert.balance.by_calls import choose_cuts
from pipert.batch.microbatch import Arguments, arguments_of, ready
from pipert.distributed.rank_messages import RankPlace
from pipert.distributed.rank_parameters import own_tree
from pipert.distributed.rank_pipe import (
    RankPipe,
    check_settings,
    layout_of,
    shared_of,
)
from pipert.distributed.rank_run import RankParts, RankRuntime, Wrap
from pipert.distributed.rank_stage import StageModule, moved
from pipert.distributed.replay_model import ReplayModel, cuts_of
from pipert.layers.batchnorm import check_batch_norm
from pipert.layers.intercepted import intercept, release
from pipert.model.parameters import META, Load, materialise, replace
from pipert.model.split import refuse_shared_norms, sequential
from pipert.pipes.base import PipeBase

__all__ = ["ModulePipe", "pipeline"]


def pipeline(
    model: nn.Module,
    cuts: Iterable[str] | None = None,
    *,
    example: Any,
    partitions: int | None = None,
    mesh: DeviceMesh | None = None,
    device: Device | None = None,
    chunks: int = 1,
    schedule: str = "1f1b",
    checkpoint: str | None = None,
    deferred_batch_norm: bool | None = None,
    load: Load | None = None,
    inputs: str = "first",
    wrap: Wrap | None = None,
) -> ModulePipe:
    """Split any module over the ranks of a process group, without rewriting it.

    All ranks make it of the same model with the same arguments, and call it together. Each rank
    runs the model's own forward, but computes only its own partitions.

    >>> pipe = pipert.distributed.pipeline(module, cuts=[], example=x)  # doctest: +SKIP
    >>> loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)  # doctest: +SKIP

    Args:
        model: the module, changed in place: parameters of other ranks lose their values, and go to
            the meta device. To never have them, build it in :func:`pipert.empty_parameters`.
        cuts: as in :func:`pipert.pipeline`; one cut fewer than there are ranks, or with
            ``'interleaved'`` one fewer than a multiple of them.
        example: arguments of the model, such as a micro-batch, the same on all ranks: a dict of
            keyword arguments, a tuple of positional ones, or a tensor. The model is run on the
            meta device with it, to find where each parameter belongs.
        partitions: the number of partitions, instead of ``cuts``; the first rank measures the
            model with the example to find cuts. The parameters must have values.
        mesh, device, chunks, schedule, checkpoint, deferred_batch_norm, wrap: as in
            :class:`pipert.distributed.Pipe`.
        load: the values of parameters: a function that returns that of a name as a tensor, or
            ``None`` if it has none; or the path of a safetensors file, or of a folder of such
            files. Each rank asks for its own names. Default: values as they are; parameters on
            the meta device get memory that is not initialised, to load a state into.
        inputs: ``'first'`` (default): the first rank's arguments are sent to all ranks;
            ``'everywhere'``: each rank gives the same arguments. Their structures and shapes are
            compared in each call, and up to 1,024 elements of each tensor that is on CPU.

    Raises:
        ValueError: as :func:`pipert.pipeline`; or the ranks were given different arguments, or the
            schedule does not fit the number of partitions, or a parameter has no value to load.
        TypeError: as :func:`pipert.pipeline`.
        ReplayError: the model's own code needs a value that is on another rank.
        RankError: another rank failed.
    """
    where = RankPlace(mesh, device)
    first = where.agreement.ranks[0]
    with where.agreement.agreeing() as chosen:
        cuts = _check(model, cuts, partitions, example, inputs)
        (example,) = ready([example])  # without Replicate
        if cuts is None and partitions is not None and dist.get_rank() == first:
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ValueError(
                    "partitions are found by measuring the model, whose parameters are on the meta "
                    "device; give cuts, such as those of a model with fewer layers"
                )
            cuts = choose_cuts(model, partitions, example)
        chosen.append(cuts)
    found = where.agreement.of(first, chosen) if cuts is None else cuts
    given = chunks, schedule, checkpoint, deferred_batch_norm
    return ModulePipe(where, model, found, example, given, load, inputs, wrap)


def _check(
    model: Any, cuts: Iterable[str] | None, partitions: int | None, example: Any, inputs: str
) -> list[str] | None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    if isinstance(model, PipeBase | RankPipe):
        raise TypeError("model is a pipe already; make another one of the module it was made of")
    if inputs not in ("first", "everywhere"):
        raise ValueError(f"inputs must be 'first' or 'everywhere', got {inputs!r}")
    if (cuts is None) == (partitions is None):
        raise ValueError(f"give cuts or partitions, and one of them: {cuts!r} and {partitions!r}")
    if cuts is None or isinstance(cuts, str):
        return cuts  # type: ignore[return-value]
    return list(cuts)


def _partition(replayed: ReplayModel, j: int) -> StageModule:
    """Return a module of the layers of partition ``j``, and of its other parameters."""
    model, names = replayed.cuts.model, replayed.cuts.layers
    called = {name: layer for layer, name in names.items() if j in replayed.layers[layer]}
    module: Any = sequential(called, model.training, StageModule)
    here = set(module.parameters())
    rest = [p for p, used in replayed.uses.items() if j in used and p not in here]
    module._parameters.update({f"own.{k}": p for k, p in enumerate(rest)})
    return module  # type: ignore[no-any-return]


class ModulePipe(RankPipe):
    """Any ``nn.Module`` over the ranks of a process group. Made by :func:`pipeline`.

    ``parameters()`` and ``state_dict()`` return this rank's part, under the plain module's names.
    Arguments are as in :func:`pipert.pipeline`; each rank needs them, so those of the first rank
    are sent to all others, or are everywhere.
    """

    module: nn.Module
    """The model. On this rank, parameters of other ranks are on the meta device."""

    def __init__(
        self, where: RankPlace, model: nn.Module, names: Iterable[str], example: Any,
        given: tuple[int, str, str | None, bool | None],
        load: Load | None, inputs: str, wrap: Wrap | None,
    ) -> None:  # fmt: skip
        super().__init__()
        agreement = where.agreement
        with agreement.agreeing() as layouts:
            cuts = cuts_of(model, names, where.device)
            check_batch_norm(model, given[-1], stacklevel=4)
            self._settings = check_settings(*given, cuts.n, where)
            self._cuts = cuts.names
            layouts.append((cuts.names, self._settings, inputs, layout_of(model)))
        agreement.require_same("arguments and layers", layouts)
        with agreement.agreeing() as found:
            intercept(cuts.layers)
            weakref.finalize(self, release, list(cuts.layers)).atexit = False
            replayed = ReplayModel(cuts, "shared" if inputs == "first" else inputs)
            replayed.place(moved(Arguments(*arguments_of(example)), where.device))
            found.append([sorted(replayed.uses[p]) for p in model.parameters()])
        agreement.require_same("example", found)
        own = where.own
        with agreement.agreeing():
            called_in = [
                [m for layer, used in replayed.layers.items() if j in used for m in layer.modules()]
                for j in range(cuts.n)
            ]
            refuse_shared_norms(called_in, where.homes)
            here = {p for p, used in replayed.uses.items() if not used.isdisjoint(own)}
            called = {layer for layer, used in replayed.layers.items() if not used.isdisjoint(own)}
            others = {m for layer in replayed.layers.keys() - called for m in layer.modules()}
            others -= {m for layer in called for m in layer.modules()}

            def device_of(tensor: Tensor) -> torch.device:
                # Buffers are everywhere, since the model's own code may use them.
                is_elsewhere = isinstance(tensor, nn.Parameter) and tensor not in here
                return META if is_elsewhere else where.device

            new: Any = materialise(model, device_of, load)
            replace(model, new)
            replayed.uses = {new[p]: used for p, used in replayed.uses.items()}
            here = {new[p] for p in here}
        modules = {j: _partition(replayed, j) for j in own}
        shared = shared_of(replayed.uses, where.homes)
        parts = RankParts(replayed, modules, [{}] * cuts.n, shared)
        self.__dict__["module"] = model
        tree = own_tree(model, here, called, others)
        self._parameters, self._buffers, self._modules = (
            tree._parameters, tree._buffers, tree._modules,
        )  # fmt: skip
        self._non_persistent_buffers_set = tree._non_persistent_buffers_set
        self._elsewhere = model.state_dict().keys() - self.state_dict().keys()
        self.training = model.training
        self._runtime = RankRuntime(where, parts, wrap)
        with agreement.agreeing():
            if any(isinstance(layer, FSDPModule) for layer in model.modules()):
                raise ValueError(
                    "wrap has sharded layers by fully_shard, which any model cannot have over "
                    "ranks; use DistributedDataParallel, or a pipert.distributed.Pipe"
                )

    @property
    def cuts(self) -> list[str]:
        """The names of the modules with which the partitions after the first begin."""
        return list(self._cuts)

    def train(self, mode: bool = True) -> Self:
        """As in ``nn.Module``; the model's own modules of other ranks as well."""
        self.module.train(mode)
        return super().train(mode)
