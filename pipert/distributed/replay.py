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
   ``n``-th event. As all ranks run the same code, they count the same events. What depends on
   inputs alone is no event.
3. A *recording* is a replay of no partition: layers run on meta tensors, so it takes neither
   weights nor messages. It finds which names cross which cut, and which partitions use which
   parameters (``replay_model``).
4. The *path* to a cut is a checksum of the events before it. Where it is another than when it was
   recorded, as a record may be of other lengths, all tensors that are alive cross.
5. Each event draws random numbers of its own; what depends on inputs alone draws from one stream
   for each micro-batch, which layers never advance. So all ranks draw the same noise.
"""

from __future__ import annotations

import weakref
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
    DEVICES,
    HOOKS,
    OF_META,
    Cuts,
    Given,
    Header,
    Leaf,
    Leave,
    Name,
    Record,
    ReplayError,
    called,
    elsewhere,
    forward_replaced,
    lacking,
    modules_in,
    not_crossed,
    on_meta,
    refuse_changed_arguments,
    refuse_hidden,
    refuse_hook,
    refuse_reading,
    refuse_reading_hooks,
    refuse_unrepeatable,
    statistics_of,
    unseen,
    written_elsewhere,
)
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
        self._phase = self._event = self._depth = self._path = 0
        self.paths, self._is_paused = list[int](), False
        """The path to each cut."""
        self.header = Header([], {}, {}, {})
        self._received: dict[Name, Tensor] = {}
        self._names: dict[int, tuple[weakref.ref[Tensor], Name]] = {}
        self._by_name: dict[Name, weakref.ref[Tensor]] = {}
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

    def receive(self, header: Header, tensors: Tensors) -> None:
        """Take what has come from the partition before."""
        self.header = Header([], {**header.calls}, {**header.made}, {**header.dtypes})
        self._received = dict(zip(header.names, tensors, strict=True))
        self._names.update({id(t): (weakref.ref(t), name) for name, t in self._received.items()})

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
            return self.header, self._left
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
        if record and record.paths == self.paths and record.structure not in (None, self.structure):
            raise lacking(self.structure, record.structure)
        return y if self._is_recording else map_tensors(y, self._real)

    def _name(self, tensor: Tensor) -> Name | None:
        found = self._names.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def is_of_layers(self, tensor: Tensor) -> bool:
        """Whether layers have made a tensor, or own code has written their values into it."""
        is_written = bool(self._written) and storage_of(tensor) in self._written
        return is_written or self._name(tensor) is not None

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in an earlier partition than this."""
        return (name := self._name(tensor)) is not None and self.header.made[name] < self._phase

    def _register(self, tensor: Tensor, name: Name) -> None:
        if self._name(tensor) is None:
            reference = weakref.ref(tensor)
            self._names[id(tensor)], self._by_name[name] = (reference, name), reference
            self.header.made[name] = self._phase

    def _note_uses(self, tensors: Sequence[Tensor]) -> None:
        """Note which partition uses these tensors; refuse what other ranks know nothing of."""
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self.own_parameters[tensor].add(self._phase)
            elif (name := self._name(tensor)) is not None:
                if self._is_elsewhere(tensor):
                    self.used[name] = self._phase
            elif tensor.is_meta or tensor.grad_fn is not None:
                raise unseen(self._phase, tensor, self._cuts.model)
            elif self.is_of_layers(tensor):
                raise written_elsewhere(self._written[storage_of(tensor)][0])

    def _real(self, tensor: Tensor) -> Tensor:
        """Return the tensor for ``tensor`` in the partition that is computed."""
        name = self._name(tensor)
        if name is None:
            if tensor.is_meta:
                raise elsewhere(self._j, describe(tensor))
            return tensor
        if name in self._received:
            return self._received[name]
        if (made := self.header.made[name]) != self._j:
            raise not_crossed(self._j, name, made)
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
            self._path = zlib.crc32(self._cuts.layers[module].encode(), self._path)
            refuse_unrepeatable()
            given = tensors_of((args, kwargs))[0]
            self._note_uses(given)
            for one in (module, *modules_in((*args, *kwargs.values()))):
                self.called[one].add(self._phase)
            if self._phase < self._j and not self._is_recording:
                return self._skip(module, given, args, kwargs)
        self._depth += 1
        try:
            if self._is_recording:  # the functions inside of the layer come to this mode
                values, layer = (*args, *kwargs.values()), self._cuts.layers[module]
                with refuse_changed_arguments(layer, values), self._drawing(self._event):
                    y = plain_call(module)(*args, **kwargs)
            else:
                with self._paused():
                    args, kwargs = map_tensors((args, kwargs), self._real)
                    given = tensors_of((args, kwargs))[0]
                    y = self._compute(module, self._event, call, args, kwargs)
        finally:
            self._depth -= 1
        with self._paused():
            self._note_result(module, given, y)
        return y

    def _go_on_to(self, begins: int) -> None:
        """Begin the next partition, or leave at the end of this rank's."""
        if begins > self._phase + 1:
            raise ReplayError(
                f"the cut {self._cuts.names[begins - 1]!r} was called before "
                f"{self._cuts.names[self._phase]!r}; give cuts in the order of their calls"
            )
        self.paths.append(self._path)
        if self._phase == self._j:
            made = {name: t for name, ref in self._by_name.items() if (t := ref()) is not None}
            alive = {**made, **self._received}
            record, wanted = self._record, sorted(alive)
            if record is not None and self.paths == record.paths[: self._j + 1]:
                wanted = list(record.crossing[self._j])
            own = [name for name in wanted if name in alive and not alive[name].is_meta]
            self.header.names, self._left = own, tuple([alive[name] for name in own])
            raise Leave
        self._phase = begins

    def _note_result(self, module: nn.Module, given: Tensors, y: Any) -> None:
        refuse_hidden(f"the layer {self._cuts.layers[module]!r}", y)
        tensors, rebuild = tensors_of(y)
        of = {id(tensor): k for k, tensor in enumerate(given)}
        leaves: list[Any] = []
        for k, tensor in enumerate(tensors):
            if tensor.is_meta and not self._is_recording:
                raise elsewhere(self._j, f"in {self._cuts.layers[module]!r}")
            if id(tensor) not in of:
                self._register(tensor, (self._event, k))
            if (name := self._name(tensor)) is None:
                leaves.append(Given(of[id(tensor)]))
            else:
                about = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
                leaves.append(Leaf(name, *about))
        self.header.calls[self._event] = self._cuts.layers[module], rebuild(tuple(leaves))

    def _skip(self, module: nn.Module, given: Tensors, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return placeholders of what a layer and its hooks return; its hooks see them, too."""
        name, result = self.header.calls.get(self._event, ("", None))
        if name != self._cuts.layers[module]:
            raise ReplayError(
                f"event {self._event} is a call of {self._cuts.layers[module]!r} here, but of "
                f"{name!r} on an earlier rank: ranks differ in the model, its mode or its inputs"
            )
        leaves, spec = flatten(result)
        y = pytree.tree_unflatten([self._placeholder(leaf, given) for leaf in leaves], spec)
        if has_hooks(module):
            with forward_replaced(module, lambda *_, **__: y), refuse_reading_hooks(name):
                plain_call(module)(*args, **kwargs)
        return y

    def _placeholder(self, leaf: Any, given: Tensors) -> Any:
        if type(leaf) is Given:
            return given[leaf.k]
        if type(leaf) is not Leaf:
            return leaf
        if (tensor := self._by_name.get(leaf.name, lambda: None)()) is None:
            made = self.header.made[leaf.name]
            self._register(tensor := leaf.placeholder(), leaf.name)
            self.header.made[leaf.name] = made
        return tensor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func in OF_META:
            return func(*args, **kwargs)
        if func in DEVICES:
            seen = torch.empty(0, device=self._device) if args[0].is_meta else args[0]
            return func(seen)
        tensors = tensors_of((args, kwargs))[0]
        if self._depth:
            if not any(t.is_meta or isinstance(t, nn.Parameter) for t in tensors):
                return func(*args, **kwargs)
            return self._on_meta(func, args, kwargs, tensors)[0]
        self._note_uses(tensors)
        refuse_hook(func, self._phase, func in HOOKS and self._is_elsewhere(args[0]))
        refuse_reading(self._statistics, tensors, func)
        if not any(self._name(t) is not None or isinstance(t, nn.Parameter) for t in tensors):
            return func(*args, **kwargs)
        return self._own_event(func, args, kwargs, tensors)

    def _own_event(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors) -> Any:
        """Carry out a function of the own code that has a named tensor or a parameter."""
        self._event += 1
        self._path = zlib.crc32(called(func).encode(), self._path)
        if self._phase == self._j:
            versions = [version(t) for t in tensors]
            with self._drawing(self._event):
                y = func(*map_tensors(args, self._real), **map_tensors(kwargs, self._real))
            pairs = zip(tensors, versions, strict=True)
            written = [t for t, before in pairs if version(t) != before]
        else:
            y, written = self._on_meta(func, args, kwargs, tensors)
        for k, tensor in enumerate(tensors_of(y)[0]):
            if not any(tensor is one for one in tensors):
                self._register(tensor, (self._event, k))
            if self._phase == self._j and torch.is_autocast_enabled(self._device.type):
                self.header.dtypes[self._event, k] = tensor.dtype
        for k, tensor in enumerate(written):
            if isinstance(tensor, nn.Parameter):
                raise ReplayError(
                    f"the model's own code changes a parameter, in {called(func)}: each rank "
                    "would change its own; do that outside of forward"
                )
            if self._name(tensor) is None:
                if not tensor.is_meta:
                    self._written[storage_of(tensor)] = called(func), tensor.untyped_storage()
                self._register(tensor, (self._event, -1 - k))
        return y

    def _on_meta(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors
    ) -> tuple[Any, list[Tensor]]:
        """Compute shapes alone; also return the real tensors that the function changes."""
        try:
            y, changed = on_meta(func, args, kwargs)
        except Exception as error:
            where = "a layer" if self._depth else f"the model's own code in partition {self._phase}"
            refused = ReplayError(
                f"{where} needs the value of a tensor that another rank has, in {called(func)}: "
                f"{str(error)[:200]}"
            )
            is_last = self._phase == self._cuts.n - 1
            refused.needs_values = self._is_recording and (self._depth > 0 or is_last)
            raise refused from error
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        results, rebuild = tensors_of(y)
        found = []
        for k, tensor in enumerate(results):
            if id(tensor) in changed:  # the function works in place
                tensor = changed[id(tensor)]
            elif not any(tensor is one for one in tensors):
                dtype = None if self._depth else self.header.dtypes.get((self._event, k))
                tensor = tensor.detach().to(dtype or tensor.dtype)  # no view of autograd's
                if needs_grad and (tensor.is_floating_point() or tensor.is_complex()):
                    tensor.requires_grad_()
            found.append(tensor)
        return rebuild(tuple(found)), list(changed.values())
