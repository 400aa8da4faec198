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
3. A *recording* (``replay_model``) is such a run for no partition: layers run on meta tensors, so
   it takes neither weights nor messages. It finds which names cross which cut, and which partitions
   use which parameters.
4. The *path* to a cut is a checksum of the events before it, and of which have returned arguments.
   Where it is another than when it was recorded, as in a record of other lengths or dtypes, all
   tensors that are alive cross.
5. Each event draws random numbers of its own; what depends on inputs alone draws from one stream
   for each micro-batch, which layers never advance. So all ranks draw the same noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._torch import function_modes, has_hooks, plain_call, storage_of
from pipert._typing import Tensors
from pipert.any_model.intercept import _METADATA
from pipert.autograd.hooks import checkpoint_around
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import describe, map_tensors, tensors_of, version
from pipert.batch.trees import flatten
from pipert.distributed.placeholders import (
    CHANGES,
    HIDES,
    LACKS,
    STRAYS,
    Cuts,
    Leave,
    Names,
    Record,
    ReplayError,
    forward_replaced,
    refuse_hidden,
)
from pipert.layers.intercepted import current_thread

Drawing = Callable[[int], AbstractContextManager[object]]
"""Makes the block in which an event draws, by its number; -1 is the stream of the own code."""

DEVICES: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cuda", "is_cpu")
)
OF_META = _METADATA - DEVICES | {Tensor.is_signed, torch.is_floating_point, torch.is_complex}
"""Functions that are the same of a placeholder."""

HOOKS = {Tensor.register_hook, Tensor.retain_grad}


def called(func: Any) -> str:
    """Return the name of a torch function."""
    return str(getattr(func, "__name__", func))


class Events(TorchFunctionMode):
    """One run of the forward, taken apart into events. How each is carried out is up to the kind.

    Args:
        cuts: the model.
        drawing: makes the block in which an event draws.
    """

    _call_layer: Callable[..., tuple[Any, Tensors]]
    """Takes a layer, what calls it and its arguments; returns its result, and the tensors it got"""
    _call_function: Callable[..., tuple[Any, Sequence[int]]]
    """Takes a function, its arguments and the tensors in them; returns its result, and which of
    these it has changed."""

    def __init__(self, cuts: Cuts, drawing: Drawing) -> None:
        super().__init__()
        self._cuts, self._drawing = cuts, drawing
        self.names = Names()
        self._at = 0
        """The partition that the forward is in."""
        self._event = 0
        """The number of the last event."""
        self._path = 0
        """A checksum of the events so far."""
        self.paths: list[int] = []
        """The path to each cut."""
        self._is_in_layer = self._is_paused = False
        # By their numbers, storages of inputs' tensors that own code has written, and by what.
        self._written: dict[int, tuple[str, Any]] = {}

    def run(self, function: Callable[..., Any], x: Any) -> Any:
        """Run the forward, ``function`` on ``x``, and return its output.

        Raises:
            ReplayError: the model does what a replay cannot do.
        """
        args, kwargs = (x.args, x.kwargs) if isinstance(x, Arguments) else ((x,), {})
        before, current_thread.interceptor = current_thread.interceptor, self
        try:
            with self._drawing(-1), self:
                y = function(*args, **kwargs)
        finally:
            current_thread.interceptor = before
        if not self.is_at_end:
            self._refuse_cut()
        self._use(tensors_of(y)[0])
        refuse_hidden("the model", y, self._is_elsewhere)
        return y

    @property
    def is_at_end(self) -> bool:
        """Whether the last partition has begun."""
        return self._at == self._cuts.n - 1

    def is_of_layers(self, tensor: Tensor) -> bool:
        """Whether layers have made a tensor, or own code has written their values into it."""
        is_written = bool(self._written) and storage_of(tensor) in self._written
        return is_written or self.names.of(tensor) is not None

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in an earlier partition than this."""
        name = self.names.of(tensor)
        return name is not None and self.names.home(name) < self._at

    def _use(self, tensors: Sequence[Tensor]) -> None:
        """Refuse to use tensors that other ranks know nothing of."""
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) or self.names.of(tensor) is not None:
                continue
            if tensor.is_meta or tensor.grad_fn is not None:
                raise ReplayError(
                    f"the model's own code in partition {self._at} uses a tensor, "
                    f"{describe(tensor)}, that was made unseen: in an earlier call, inside of a "
                    "layer (an auxiliary loss, attention weights that a hook collects), in a "
                    f"compiled function or in a torch.autograd.Function, {HIDES}"
                )
            if self.is_of_layers(tensor):
                raise ReplayError(
                    "the model's own code has written a value of a layer, in "
                    f"{self._written[storage_of(tensor)][0]}, into memory that it uses under "
                    f"another name, such as a view, {CHANGES}"
                )

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
        """Carry out a call of a module, an event if it is a layer and not inside of another one."""
        if self._is_in_layer or module not in self._cuts.layers:
            return call(*args, **kwargs)
        with self._paused():
            begins = self._cuts.begins.get(module, 0)
            if begins > self._at:
                self._go_on_to(begins)
            self._event += 1
            if torch.is_grad_enabled() and checkpoint_around() is not None:
                raise ReplayError(
                    "the model's own code calls a layer inside of torch.utils.checkpoint (in place "
                    f"of checkpoint= of the pipe), whose recomputation needs values, {LACKS}"
                )
            self._use(tensors_of((args, kwargs))[0])
        self._is_in_layer = True
        try:
            y, given = self._call_layer(module, call, args, kwargs)
        finally:
            self._is_in_layer = False
        with self._paused():
            refuse_hidden(f"the layer {self._cuts.layers[module]!r}", y)
            self._tell(self._cuts.layers[module], given, y)
        return y

    def _inside_layer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Carry out a function that a layer calls, if this mode is not paused there."""
        return func(*args, **kwargs)

    def _go_on_to(self, begins: int) -> None:
        """Begin the next partition."""
        if begins > self._at + 1:
            self._refuse_cut()
        self.paths.append(self._path)
        self._at = begins

    def _refuse_cut(self) -> NoReturn:
        raise ReplayError(
            f"the cut {self._cuts.names[self._at]!r} was not called next after partition "
            f"{self._at} had begun; name modules that each forward calls, in that order"
        )

    def _tell(self, name: str, given: Tensors, y: Any, written: Sequence[int] = ()) -> None:
        """Name the results of the event."""
        old = self.names.tell(self._event, self._at, name, given, y, written)
        self._path = zlib.crc32(f"{name}{old}".encode(), self._path)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func in OF_META:
            return func(*args, **kwargs)
        if func in DEVICES:
            is_here = args[0].is_meta or isinstance(args[0], nn.Parameter)
            return func(torch.empty(0, device=self._cuts.device) if is_here else args[0])
        if self._is_in_layer:
            return self._inside_layer(func, args, kwargs)
        tensors = tensors_of((args, kwargs))[0]
        self._use(tensors)
        if func in HOOKS:
            if self._is_elsewhere(args[0]):
                raise ReplayError(
                    f"the model's own code in partition {self._at} calls {called(func)} of a "
                    f"tensor of an earlier partition, and needs the whole gradient, {LACKS}"
                )
            return func(*args, **kwargs)
        if not any(self.names.of(t) is not None or isinstance(t, nn.Parameter) for t in tensors):
            return func(*args, **kwargs)
        return self._own_event(func, args, kwargs, tensors)

    def _own_event(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors) -> Any:
        """Carry out a function of the own code that has a named tensor or a parameter."""
        self._event += 1
        name = called(func)
        y, written = self._call_function(func, args, kwargs, tensors)
        self._tell(name, tensors, y, written)
        for k in written:
            tensor = tensors[k]
            if isinstance(tensor, nn.Parameter):
                what = f"the model's own code changes a parameter, in {name}"
                raise ReplayError(f"{what}, {CHANGES}")
            if self.names.of(tensor) is None:
                if not tensor.is_meta:
                    self._written[storage_of(tensor)] = name, tensor.untyped_storage()
                self.names.add(tensor, (self._event, -1 - k))
        return y


class Replay(Events):
    """Computes partition ``j`` of one micro-batch.

    Args:
        j: the partition.
        compute: calls a layer of this partition, ``compute(layer, n, call, args, kwargs)``.
        record: the record of a micro-batch like this one; ``None`` sends all that is alive.
        cuts, drawing: as in :class:`Events`.
    """

    def __init__(
        self, j: int, compute: Any, record: Record | None, cuts: Cuts, drawing: Drawing
    ) -> None:
        super().__init__(cuts, drawing)
        self._j, self._compute, self._record = j, compute, record

    def run(self, function: Callable[..., Any], x: Any) -> Any:
        """Run the forward, ``function`` on ``x``.

        Returns:
            Of the last partition the output; else a pair of the header and the tensors that leave.
        """
        try:
            y = super().run(function, x)
        except Leave:
            return self._leaving()
        record, structure = self._record, flatten(y)[1]
        if record and record.paths == self.paths and record.structure != structure:
            raise ReplayError(
                f"the model's output is {structure}, but {record.structure} when it was "
                f"recorded: layers keep something elsewhere, such as output_attentions, {HIDES}"
            )
        return map_tensors(y, self._real)

    def _leaving(self) -> tuple[Any, Tensors]:
        names, record, alive = self.names, self._record, self.names.alive()
        names.header.names = sorted(alive)
        if record is not None and self.paths == record.paths[: self._j + 1]:
            names.header.names = [name for name in record.crossing[self._j] if name in alive]
        return names.header, tuple([alive[name] for name in names.header.names])

    def _go_on_to(self, begins: int) -> None:
        super()._go_on_to(begins)
        if begins > self._j:
            raise Leave

    def _call_layer(
        self, module: nn.Module, call: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Tensors]:
        with self._paused():
            if self._at == self._j:
                args, kwargs = map_tensors((args, kwargs), self._real)
                y = self._compute(module, self._event, call, args, kwargs)
                return y, tensors_of((args, kwargs))[0]
            given = tensors_of((args, kwargs))[0]
            y, _ = self.names.told(self._event, self._cuts.layers[module], given)
            if has_hooks(module):  # which see placeholders
                with forward_replaced(module, lambda *_, **__: y):
                    plain_call(module)(*args, **kwargs)
            return y, given

    def _call_function(
        self, func: Any, args: Any, kwargs: Any, tensors: Tensors
    ) -> tuple[Any, Sequence[int]]:
        if self._at < self._j:
            return self.names.told(self._event, called(func), tensors)
        versions = [version(t) for t in tensors]
        with self._drawing(self._event):
            y = func(*map_tensors(args, self._real), **map_tensors(kwargs, self._real))
        pairs = enumerate(zip(tensors, versions, strict=True))
        return y, [k for k, (t, before) in pairs if version(t) != before]

    def _tell(self, name: str, given: Tensors, y: Any, written: Sequence[int] = ()) -> None:
        if self._at == self._j and any(tensor.is_meta for tensor in tensors_of(y)[0]):
            what = f"partition {self._j} lacks a parameter or buffer of {name!r}"
            raise ReplayError(f"{what}: {STRAYS}")
        super()._tell(name, given, y, written)

    def _real(self, tensor: Tensor) -> Tensor:
        """Return the tensor for ``tensor`` in the partition that is computed."""
        name = self.names.of(tensor)
        if name is None:
            if tensor.is_meta:
                names = [name for name, p in self._cuts.model.named_parameters() if p is tensor]
                raise ReplayError(
                    f"partition {self._j} uses {describe(tensor)} of another partition, "
                    f"{names[0] if names else 'a buffer'!r}: {STRAYS}"
                )
            return tensor
        if name in self.names.received:
            return self.names.received[name]
        event, made, *_ = self.names.header.calls[name[0]]
        if made != self._j:
            raise ReplayError(
                f"partition {self._j} uses a result of {event!r} of partition {made}, which did "
                f"not cross: {STRAYS}"
            )
        return tensor
