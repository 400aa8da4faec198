"""Computes one partition of any model by a *replay* of its forward, on the rank that has it.

The standard way is to take a model apart: by a tracer, which fails on what it cannot trace, or by
hand. Here every rank runs the model's own ``forward`` on the same inputs, for each micro-batch and
each of its partitions:

==================== =================================== ======================================
the forward is in    calls of layers                     the model's own code between them
==================== =================================== ======================================
an earlier partition not made; placeholders, meta        for real if it depends on inputs alone
                     tensors, in the structure that the  (masks, positions, noise); else on
                     header tells                        placeholders
this partition       made; a placeholder in the          for real, likewise
                     arguments becomes the tensor that
                     was received for it
a later partition    not reached: at its cut the forward is broken off by :class:`Leave`
==================== =================================== ======================================

1. A *layer* is one of the largest modules that have parameters and no cut inside. All else,
   modules without parameters included, is the model's own code. So no mask crosses.
2. An *event* is a call of a layer, or a torch function of the own code that has a parameter or a
   named tensor among its arguments. A tensor's *name* is ``(n, k)``: the ``k``-th result of the
   ``n``-th event, unless an argument was returned. As all ranks run the same code, they count the
   same events, and the header tells their results. What depends on inputs alone is no event.
3. A *recording* is a replay of no partition: layers run on meta tensors, so it takes neither
   weights nor messages. It finds which names cross which cut, and which partitions use which
   parameters (``replay_model``). A layer that needs values, as experts do, runs on zeros.
4. The *path* to a cut is a checksum of the events before it, and of which have returned arguments.
   Where it is another than when it was recorded, as in a record of other lengths or dtypes, all
   tensors that are alive cross.
5. Each event draws random numbers of its own; what depends on inputs alone draws from one stream
   for each micro-batch, which layers never advance. So all ranks draw the same noise.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._torch import function_modes, has_hooks, plain_call, pytree, storage_of
from pipert._typing import Tensors
from pipert.any_model.map_tensors import map_tensors
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import describe, tensors_of, version
from pipert.batch.trees import flatten
from pipert.distributed.placeholders import (
    Cuts,
    Leave,
    Name,
    Names,
    NeedsValue,
    Record,
    ReplayError,
    changes,
    forward_replaced,
    hides,
    lacks,
    refuse_changed_arguments,
    refuse_hidden,
    refuse_reading_hooks,
    refuse_unrepeatable,
    statistics_of,
    strays,
    unseen,
)
from pipert.distributed.recording import DEVICES, HOOKS, OF_META, Zeros, called, on_meta
from pipert.layers.intercepted import here


class Replay(TorchFunctionMode):
    """One run of the forward, for partition ``j`` of one micro-batch; a recording if it is ``n``.

    Args:
        cuts: the model.
        j: the partition to compute.
        device: this rank's.
        drawing: makes the block in which an event draws, by its number; -1 is the own stream.
        compute: calls a layer of this partition, ``compute(layer, n, call, args, kwargs)``;
            ``None`` if it records.
        record: the record of a micro-batch like this one; ``None`` sends all that is alive.
    """

    def __init__(
        self,
        cuts: Cuts,
        j: int,
        device: torch.device,
        drawing: Callable[[int], AbstractContextManager[object]],
        compute: Any,
        record: Record | None,
    ) -> None:
        super().__init__()
        self._cuts, self._j, self._device, self._record = cuts, j, device, record
        self._drawing, self._compute = drawing, compute
        self._is_recording = j == cuts.n
        self._zeros: Zeros | None = None  # while a layer is recorded with them
        self._phase = self._event = self._depth = self._path = 0
        self.paths, self._is_paused = list[int](), False
        """The path to each cut."""
        self.names = Names()
        # By their numbers, storages of inputs' tensors that own code has written, and by what.
        self._written: dict[int, tuple[str, Any]] = {}
        self._statistics = statistics_of(cuts.layers if self._is_recording else ())
        self.used: dict[Name, int] = {}
        """For each name, the last partition that uses it, if another one has made it."""
        self.own_parameters: dict[nn.Parameter, set[int]] = defaultdict(set)
        """The partitions whose own code uses each parameter."""
        self.called: dict[nn.Module, set[int]] = defaultdict(set)
        """The partitions that call each layer."""
        self.structure: Any = None  # of the output

    def run(self, function: Callable[..., Any], x: Any) -> Any:
        """Run the forward, ``function`` on ``x``.

        Returns:
            Of the last partition the output; else a pair of the header and the tensors that leave.

        Raises:
            ReplayError: the model does what a replay cannot do.
        """
        args, kwargs = (x.args, x.kwargs) if isinstance(x, Arguments) else ((x,), {})
        before, here.interceptor = here.interceptor, self
        try:
            with self._drawing(-1), self:
                y = function(*args, **kwargs)
        except Leave:
            return self.names.header, self._left
        finally:
            here.interceptor = before
        if (j := self._phase) < self._cuts.n - 1:
            raise ReplayError(
                f"the cut {self._cuts.names[j]!r} was not called after partition {j} had begun; "
                "name modules that each forward calls, in that order"
            )
        self._note_uses(tensors_of(y)[0])
        refuse_hidden("the model", y, self._is_elsewhere)
        self.structure = flatten(y)[1]
        record = self._record
        if record and record.paths == self.paths and record.structure != self.structure:
            raise hides(
                f"the model's output is {self.structure}, but {record.structure} when it was "
                "recorded: layers keep something elsewhere, such as output_attentions"
            )
        return y if self._is_recording else map_tensors(y, self._real)

    @property
    def is_at_end(self) -> bool:
        """Whether the last partition has begun."""
        return self._phase == self._cuts.n - 1

    def is_of_layers(self, tensor: Tensor) -> bool:
        """Whether layers have made a tensor, or own code has written their values into it."""
        is_written = bool(self._written) and storage_of(tensor) in self._written
        return is_written or self.names.of(tensor) is not None

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in an earlier partition than this."""
        name = self.names.of(tensor)
        return name is not None and self.names.home(name) < self._phase

    def _note_uses(self, tensors: Sequence[Tensor]) -> None:
        """Note which partition uses these tensors; refuse what other ranks know nothing of."""
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self.own_parameters[tensor].add(self._phase)
            elif (name := self.names.of(tensor)) is not None:
                if self._is_elsewhere(tensor):
                    self.used[name] = self._phase
            elif tensor.is_meta or tensor.grad_fn is not None:
                raise unseen(self._phase, tensor, self._cuts.model)
            elif self.is_of_layers(tensor):
                raise changes(
                    "the model's own code has written a value of a layer, in "
                    f"{self._written[storage_of(tensor)][0]}, into memory that it uses under "
                    "another name, such as a view"
                )

    def _real(self, tensor: Tensor) -> Tensor:
        """Return the tensor for ``tensor`` in the partition that is computed."""
        name = self.names.of(tensor)
        if name is None:
            if tensor.is_meta:
                names = [name for name, p in self._cuts.model.named_parameters() if p is tensor]
                raise strays(
                    f"partition {self._j} uses {describe(tensor)} of another partition, "
                    f"{names[0] if names else 'a buffer'!r}"
                )
            return tensor
        if name in self.names.received:
            return self.names.received[name]
        event, made, *_ = self.names.header.calls[name[0]]
        if made != self._j:
            raise strays(
                f"partition {self._j} uses a result of {event!r} of partition {made}, which did "
                "not cross"
            )
        return tensor

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """See no function in the block, at no cost if this mode is the innermost."""
        is_on_top, was_paused = function_modes()[-1:] == [self], self._is_paused
        if is_on_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = was_paused
            if is_on_top:
                self.__enter__()  # type: ignore[no-untyped-call]

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a layer in its partition; before, return placeholders."""
        if self._depth or module not in self._cuts.layers:
            return call(*args, **kwargs)
        with self._paused():
            begins = self._cuts.begins.get(module, 0)
            if begins > self._phase:
                self._go_on_to(begins)
            self._event += 1
            refuse_unrepeatable()
            given = tensors_of((args, kwargs))[0]
            self._note_uses(given)
            for one in (module, *args, *kwargs.values()):
                if isinstance(one, nn.Module):  # such as an embedding whose weight a head uses
                    self.called[one].add(self._phase)
            if self._phase < self._j and not self._is_recording:
                return self._skip(module, given, args, kwargs)
        self._depth += 1
        try:
            if self._is_recording:  # the functions inside of the layer come to this mode
                y = self._call_on_meta(module, args, kwargs)
            else:
                with self._paused():
                    args, kwargs = map_tensors((args, kwargs), self._real)
                    given = tensors_of((args, kwargs))[0]
                    y = self._compute(module, self._event, call, args, kwargs)
        finally:
            self._depth -= 1
        with self._paused():
            refuse_hidden(f"the layer {self._cuts.layers[module]!r}", y)
            self._tell(self._cuts.layers[module], given, y)
        return y

    def _call_on_meta(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a layer in a recording; with zeros if it needs values."""
        name, call = self._cuts.layers[module], plain_call(module)
        with refuse_changed_arguments(name, (*args, *kwargs.values())):
            try:
                with self._drawing(self._event):
                    return call(*args, **kwargs)
            except NeedsValue:
                self._zeros = Zeros(module, self._device)
            try:
                with self._drawing(self._event):
                    return self._zeros.call(name, call, args, kwargs)
            finally:
                self._zeros = None

    def _go_on_to(self, begins: int) -> None:
        """Begin the next partition, or leave at the end of this rank's."""
        if begins > self._phase + 1:
            raise ReplayError(
                f"the cut {self._cuts.names[begins - 1]!r} was called before "
                f"{self._cuts.names[self._phase]!r}; give cuts in the order of their calls"
            )
        self.paths.append(self._path)
        if self._phase == self._j:
            record, alive = self._record, self.names.alive()
            leaving = sorted(alive)
            if record is not None and self.paths == record.paths[: self._j + 1]:
                leaving = [name for name in record.crossing[self._j] if name in alive]
            self.names.header.names, self._left = leaving, tuple([alive[one] for one in leaving])
            raise Leave
        self._phase = begins

    def _tell(self, name: str, given: Tensors, y: Any, written: Sequence[int] = ()) -> None:
        if self._phase == self._j and any(tensor.is_meta for tensor in tensors_of(y)[0]):
            raise strays(f"partition {self._j} lacks a parameter or buffer of {name!r}")
        old = self.names.tell(self._event, self._phase, name, given, y, written)
        self._path = zlib.crc32(f"{name}{old}".encode(), self._path)

    def _skip(self, module: nn.Module, given: Tensors, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return placeholders of what a layer and its hooks return; its hooks see them, too."""
        name = self._cuts.layers[module]
        y, _ = self.names.told(self._event, name, given)
        if has_hooks(module):
            with forward_replaced(module, lambda *_, **__: y), refuse_reading_hooks(name):
                plain_call(module)(*args, **kwargs)
        self._tell(name, given, y)
        return y

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func in OF_META:
            return func(*args, **kwargs)
        if func in DEVICES:
            is_here = args[0].is_meta or isinstance(args[0], nn.Parameter)
            return func(torch.empty(0, device=self._device) if is_here else args[0])
        tensors = tensors_of((args, kwargs))[0]
        if self._zeros is not None:
            args, kwargs = pytree.tree_map_only(Tensor, self._zeros.of, (args, kwargs))
            return func(*args, **kwargs)
        if self._depth:
            if not any(t.is_meta or isinstance(t, nn.Parameter) for t in tensors):
                return func(*args, **kwargs)
            return self._on_meta(func, args, kwargs, tensors)[0]
        self._note_uses(tensors)
        if func in HOOKS:
            if self._is_elsewhere(args[0]):
                raise lacks(
                    f"the model's own code in partition {self._phase} calls {called(func)} of a "
                    "tensor of an earlier partition, and needs the whole gradient"
                )
            return func(*args, **kwargs)
        if not self._statistics.isdisjoint(map(id, tensors)):
            raise lacks(
                f"the model's own code reads running statistics of a layer, in {called(func)}"
            )
        if not any(self.names.of(t) is not None or isinstance(t, nn.Parameter) for t in tensors):
            return func(*args, **kwargs)
        return self._own_event(func, args, kwargs, tensors)

    def _own_event(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors) -> Any:
        """Carry out a function of the own code that has a named tensor or a parameter."""
        self._event += 1
        name = called(func)
        written: Sequence[int]
        if self._phase == self._j:
            versions = [version(t) for t in tensors]
            with self._drawing(self._event):
                y = func(*map_tensors(args, self._real), **map_tensors(kwargs, self._real))
            pairs = enumerate(zip(tensors, versions, strict=True))
            written = [k for k, (t, before) in pairs if version(t) != before]
        elif self._is_recording:
            y, written = self._on_meta(func, args, kwargs, tensors)
        else:
            y, written = self.names.told(self._event, name, tensors)
        self._tell(name, tensors, y, written)
        for k in written:
            tensor = tensors[k]
            if isinstance(tensor, nn.Parameter):
                raise changes(f"the model's own code changes a parameter, in {name}")
            if self.names.of(tensor) is None:
                if not tensor.is_meta:
                    self._written[storage_of(tensor)] = name, tensor.untyped_storage()
                self.names.add(tensor, (self._event, -1 - k))
        return y

    def _on_meta(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors
    ) -> tuple[Any, list[int]]:
        casts = self._device if torch.is_autocast_enabled(self._device.type) else None
        try:
            return on_meta(func, args, kwargs, tensors, casts)
        except Exception as error:
            raise NeedsValue(
                f"the model's own code in partition {self._phase} needs the value of a tensor of a "
                f"layer, in {called(func)}: {str(error)[:200]}; put it into a layer"
            ) from error
