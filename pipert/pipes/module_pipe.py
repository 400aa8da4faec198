"""``ModulePipe``: any ``nn.Module`` that runs pipeline-parallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipert._torch import STATE_TABLES
from pipert._typing import Device, Value
from pipert.any_model.model import AnyModel
from pipert.any_model.routed import Routed
from pipert.batch.joining import JoinNumbers
from pipert.layers.batchnorm import check_batch_norm
from pipert.model.cuts import check_cuts, homes, homes_outside_of_layers, layers_of
from pipert.model.device_map import note_device_map
from pipert.model.devices import devices_and_workers, refuse_data_parallel
from pipert.model.parameters import Load, materialise, replace
from pipert.model.settings import OF_CALLS, check_keywords, check_timeout
from pipert.model.split import Partition, check_shared, move, place, sequential
from pipert.pipes.base import PipeBase
from pipert.schedules.plan import Schedule, recomputed_in_each
from pipert.stage.loss import own_loss
from pipert.stage.loss_checks import StepCall

__all__ = ["ModulePipe"]

OrderOf = Callable[[Mapping[str, nn.Module], Sequence[str]], Sequence[str]]
"""Returns which layers, by name, a model with these cuts calls, in the order of first calls."""


class ModulePipe(PipeBase):
    """Runs any ``nn.Module`` over several devices. Made by :func:`pipeline`.

    Calls, steps, settings and closing are as in :class:`Pipe`, unless that function says otherwise.
    """

    module: nn.Module
    """The model, on its devices. Its parameters are the pipe's. Use it for whatever surrounds
    training, such as ``save_pretrained``."""

    _routed: Routed

    def __init__(
        self,
        module: nn.Module,
        cuts: Iterable[str],
        order_of: OrderOf | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str | Sequence[str] | None = None,
        schedule: str | Schedule = "1f1b",
        deferred_batch_norm: bool | None = None,
        timeout: float | None = None,
        load: Load | None = None,
    ) -> None:
        refuse_data_parallel(module)
        names = check_cuts(module, cuts)
        n = len(names) + 1
        super().__init__(n, chunks, checkpoint, schedule, deferred_batch_norm, timeout)
        self._cuts = names
        self._devices, self._workers = devices_and_workers(devices, n)
        check_batch_norm(module, deferred_batch_norm, stacklevel=4)  # behind pipeline()
        self.__dict__["module"] = module
        for name in STATE_TABLES:
            self.__dict__[name] = module.__dict__[name]
        self.training = module.training
        self._split(order_of, load)
        self._start()

    def _split(self, order_of: OrderOf | None, load: Load | None) -> None:
        """Find the layers of each partition, and put them on its device."""
        module, cuts = self.module, self._cuts
        layers = layers_of(module, cuts)
        order = None if order_of is None else order_of(layers, cuts)
        home_of = homes(layers, cuts, order)
        called = dict.fromkeys([*(order or ()), *layers])  # in the order of calls, if it is known
        partitions = [
            {name: layers[name] for name in called if home_of[name] == j}
            for j in range(len(cuts) + 1)
        ]
        self._partitions = tuple(sequential(p, module.training, Partition) for p in partitions)
        outside = homes_outside_of_layers(module, layers, cuts, home_of)
        if load is not None:
            check_shared(self._partitions, self._devices, copies_buffers=True)
            new = materialise(module, self._device_of(outside), load)
            for parameter in module.parameters():  # the same objects, which an optimizer may have
                if (made := new.pop(parameter)) is not parameter:
                    torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
            replace(module, new)
        place(self._partitions, self._devices, copies_buffers=True)
        for path, j in outside.items():
            owner, _, name = path.rpartition(".")
            move(module.get_submodule(owner), name, self._devices[j])
        homes_of_all = {**home_of, **outside}
        note_device_map(module, {name: self._devices[j] for name, j in homes_of_all.items()})

    def _device_of(self, outside: Mapping[str, int]) -> Callable[[Tensor], torch.device]:
        """Return what knows each tensor's device: that of the first partition that has it."""
        found: dict[Tensor, torch.device] = {}
        for partition, device in zip(self._partitions, self._devices, strict=True):
            for tensor in (*partition.parameters(), *partition.buffers()):
                found.setdefault(tensor, device)
        for path, j in outside.items():
            owner, _, name = path.rpartition(".")
            found.setdefault(getattr(self.module.get_submodule(owner), name), self._devices[j])
        return found.__getitem__

    @property
    def cuts(self) -> list[str]:
        """The names of the modules with which the partitions after the first begin.

        Cuts found by measuring can be pasted into ``pipeline(model, cuts=...)``.
        """
        return list(self._cuts)

    def _model(self) -> AnyModel:
        model = AnyModel(self.module, self._partitions, self._cuts, self._devices)
        self._release = weakref.finalize(self, model.to_end())
        self._release.atexit = False
        return model

    def _start(self) -> None:
        super()._start()
        self.__dict__["_routed"] = Routed(self.module, self)

    def is_inside(self) -> bool:
        """Whether the current code runs inside of this pipe."""
        return self._runtime.is_inside()

    def splits_or_recomputes(self, in_one: bool = False) -> bool:
        """Whether a call has several micro-batches, if not ``in_one``, or is recomputed."""
        if in_one:
            recomputed = recomputed_in_each(self.checkpoint, 1, len(self._partitions))
            return torch.is_grad_enabled() and any(recomputed)
        return self._chunks > 1 or (
            torch.is_grad_enabled() and self._checkpoint not in (None, "never")
        )

    def forward(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Value:
        """Run a mini-batch as a call of the model does, but leave outputs on their devices.

        Arguments, ``timeout`` and errors are as in :meth:`Pipe.forward`. A model that returns a
        single number for each of several micro-batches is refused, unless these are losses that
        add up.
        """
        check_keywords(self.module, OF_CALLS, {"timeout": timeout}, len(args), kwargs)
        return self._routed.run_in(self, self.module, args, kwargs, timeout)

    def _take_step(self, call: StepCall, seconds: float | None) -> Any:
        take = partial(super()._take_step, seconds=seconds)
        if call.microbatches is not None or call.chunks == 1:
            return take(call)
        args, kwargs = self._routed.with_whole(call.args, call.kwargs)
        call = call._replace(args=args, kwargs=kwargs)
        is_own = call.loss_fn is own_loss and call.denominator is None
        if not is_own or call.reduction != "mean":
            return take(call)
        named = self._routed.named(call.args, call.kwargs)
        if named.get("return_loss"):  # so models of transformers name a contrastive one, of all
            self._routed.warn_of_loss(self)
            return take(call._replace(chunks=1))
        return self._routed.losses.take_step(self.module, named, call, take)

    def call_model(
        self, call: Callable[..., Value], args: Any, kwargs: dict[str, Any],
        why_in_one: str, join_numbers: JoinNumbers, seconds: float | None = None,
    ) -> Value:  # fmt: skip
        """Call the model, in one micro-batch if there is a reason.

        ``call`` calls it, for each micro-batch; ``join_numbers`` joins 0-dimensional outputs.
        """
        seconds = self._limit_of_call(seconds)
        chunks = 1 if why_in_one else self._chunks
        if chunks < self._chunks:
            for recording in self._runtime.trace.recordings:
                text = f"one micro-batch of {self._chunks} asked for, because {why_in_one}"
                recording._in_one[text] = None
        return self._call(args, kwargs, chunks, seconds, call, join_numbers)

    def close(self, timeout: float | None = None) -> None:
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        model = self._runtime.model
        assert isinstance(model, AnyModel)
        try:
            super().close(seconds)
        finally:
            model.threads.stop()
            self._routed.remove()
            self._release()  # a finalizer: runs only once, even if it was interrupted
        if not self._runtime.is_inside():  # else other threads may be waiting for this layer
            model.threads.close(timeout=seconds)

    close.__doc__ = PipeBase.close.__doc__

    def train(self, mode: bool = True) -> Self:
        """As in ``nn.Module``."""
        self.module.train(mode)
        self.training = mode
        for partition in self._partitions:
            partition.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {k: v for k, v in state.items() if k not in ("_release", "_routed")}

    def __repr__(self) -> str:
        lines = [f"pipeline of {type(self.module).__qualname__}, {self.extra_repr()}"]
        for j, (partition, device) in enumerate(zip(self._partitions, self._devices, strict=True)):
            first, *_, last = [*(partition._modules or ["nothing"])] * 2
            layers = f"{first} to {last}" if first else "the whole model"
            lines.append(f"  partition {j} on {device}: {layers}")
        return "\n".join([*lines, f"  cuts={self.cuts}"])
