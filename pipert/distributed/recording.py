"""Records a model's forward on meta tensors: what crosses its cuts, and who uses its parameters.

A layer that needs values, as experts do that choose by them, is recorded with zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import FakeTensorMode, NormBase, plain_call, pytree
from pipert._typing import Tensors
from pipert.batch.tensors import map_tensors, tensors_of
from pipert.batch.trees import flatten
from pipert.distributed.placeholders import (
    LACKS,
    META,
    Cuts,
    Name,
    NeedsValue,
    Record,
    ReplayError,
    refuse_changed_arguments,
    reshape,
)
from pipert.distributed.replay import Drawing, Events, called


class Recording(Events):
    """A run of the forward that computes no partition, on meta tensors or zeros."""

    def __init__(self, cuts: Cuts, drawing: Drawing) -> None:
        super().__init__(cuts, drawing)
        self._zeros: Zeros | None = None  # while a layer is recorded with them
        norms = [m for layer in cuts.layers for m in layer.modules() if isinstance(m, NormBase)]
        self._statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        self._used: dict[Name, int] = {}
        """For each name, the last partition that uses it, if another one has made it."""
        self.own_parameters: dict[nn.Parameter, set[int]] = defaultdict(set)
        """The partitions whose own code uses each parameter."""
        self.called: dict[nn.Module, set[int]] = defaultdict(set)
        """The partitions that call each layer."""
        self._structure: Any = None

    def run(self, function: Callable[..., Any], x: Any) -> None:
        """Run the forward, ``function`` on ``x``."""
        self._structure = flatten(super().run(function, x))[1]

    def record(self) -> Record:
        """Return what was found."""
        home = self.names.home
        crossing = [
            sorted(name for name, user in self._used.items() if home(name) <= j < user)
            for j in range(self._cuts.n)
        ]
        return Record(crossing, self.paths, self._structure)

    def _use(self, tensors: Sequence[Tensor]) -> None:
        super()._use(tensors)
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self.own_parameters[tensor].add(self._at)
            elif self._is_elsewhere(tensor):
                self._used[self.names.of(tensor)] = self._at  # type: ignore[index]
            elif id(tensor) in self._statistics:
                raise ReplayError(
                    f"the model's own code reads running statistics of a layer, {LACKS}"
                )

    def _call_layer(
        self, module: nn.Module, call: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Tensors]:
        name, call = self._cuts.layers[module], plain_call(module)
        for one in (module, *args, *kwargs.values()):
            if isinstance(one, nn.Module):  # such as an embedding whose weight a head uses
                self.called[one].add(self._at)
        given = tensors_of((args, kwargs))[0]
        with refuse_changed_arguments(name, (*args, *kwargs.values())):
            try:
                with self._drawing(self._event):
                    return call(*args, **kwargs), given
            except NeedsValue:
                self._zeros = Zeros(module, self._cuts.device)
            try:
                with self._drawing(self._event):
                    return self._zeros.call(name, call, args, kwargs), given
            finally:
                self._zeros = None

    def _inside_layer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._zeros is not None:
            args, kwargs = pytree.tree_map_only(Tensor, self._zeros.of, (args, kwargs))
            return func(*args, **kwargs)
        tensors = tensors_of((args, kwargs))[0]
        if not any(t.is_meta or isinstance(t, nn.Parameter) for t in tensors):
            return func(*args, **kwargs)
        return self._call_function(func, args, kwargs, tensors)[0]

    def _call_function(
        self, func: Any, args: Any, kwargs: Any, tensors: Tensors
    ) -> tuple[Any, Sequence[int]]:
        device = self._cuts.device
        casts = device if torch.is_autocast_enabled(device.type) else None
        try:
            return on_meta(func, args, kwargs, tensors, casts)
        except Exception as error:
            raise NeedsValue(
                f"the model's own code in partition {self._at} needs the value of a tensor of a "
                f"layer, in {called(func)}: {str(error)[:200]}; put it into a layer"
            ) from error


def on_meta(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors, casts: torch.device | None
) -> tuple[Any, list[int]]:
    """Call a torch function with meta tensors in place of all others, which stay unchanged.

    Args:
        func, args, kwargs: the call.
        tensors: those among the arguments.
        casts: the device whose autocast is on; torch has none for meta tensors.

    Returns:
        The result, in meta tensors but for those arguments that the function returns; and which
        of ``tensors`` it would change.
    """
    if func in (Tensor.cpu, Tensor.cuda):
        return args[0], []
    if func in (Tensor.__getitem__, Tensor.__setitem__):  # a real mask has its number of rows
        args = (args[0], _as_numbers(args[1]), *args[2:])
    mode = None if casts is None else FakeTensorMode(allow_non_fake_inputs=True)
    metas: dict[int, tuple[Tensor, int]] = {}

    def meta(x: Any) -> Any:
        if isinstance(x, torch.device) or (func is Tensor.to and type(x) is str):
            return casts or META
        if not isinstance(x, Tensor):
            return x
        if id(x) not in metas:
            one = x
            if mode is not None:
                with mode:
                    one = _empty_like(x, casts)
            elif not x.is_meta:
                one = _empty_like(x)
            metas[id(x)] = one, one._version
        return metas[id(x)][0]

    args, kwargs = pytree.tree_map(meta, (tuple(args), dict(kwargs)))
    if kwargs.get("device") is not None:
        kwargs["device"] = casts or META
    with torch.no_grad():
        y = func(*args, **kwargs)
    for x in tensors if mode is not None else ():
        if id(x) in metas:
            reshape(x, metas[id(x)][0].shape, metas[id(x)][0].stride())
    given = {id(metas[id(x)][0]): x for x in tensors if id(x) in metas}
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    results, rebuild = tensors_of(y)
    found = [given[id(t)] if id(t) in given else placeholder_of(t, needs_grad) for t in results]
    pairs = enumerate([metas.get(id(x)) for x in tensors])
    return rebuild(tuple(found)), [k for k, pair in pairs if pair and pair[0]._version != pair[1]]


def placeholder_of(tensor: Tensor, needs_grad: bool) -> Tensor:
    """Return a meta tensor like this one; it requires grad if its dtype can."""
    is_trained = needs_grad and (tensor.is_floating_point() or tensor.is_complex())
    return _empty_like(tensor).requires_grad_(is_trained)


def _empty_like(tensor: Tensor, device: torch.device | None = META) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class Zeros:
    """Zeros for a ``layer`` that cannot be recorded on meta tensors, as experts choose by values.

    Whatever has no value here is a zero of the same shape, made where a function needs it.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._layer, self._device = layer, device
        self._buffers = {id(buffer) for buffer in layer.buffers()}

    def of(self, tensor: Tensor) -> Tensor:
        """Return what a function inside of the layer gets for ``tensor``."""
        if tensor.is_meta or isinstance(tensor, nn.Parameter):
            return _empty_like(tensor, self._device).zero_()
        return tensor.to(self._device) if id(tensor) in self._buffers else tensor

    def call(self, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the layer; return its result in meta tensors but for its arguments."""
        given = tensors_of((args, kwargs))[0]
        zeros = {id(tensor): self.of(tensor) for tensor in given}
        back = {id(zeros[id(tensor)]): tensor for tensor in given}
        trained = any(t.requires_grad for t in (*given, *self._layer.parameters()))
        needs_grad = torch.is_grad_enabled() and trained
        args, kwargs = map_tensors((args, kwargs), lambda t: zeros[id(t)])
        try:
            with torch.no_grad():
                y = call(*args, **kwargs)
        except Exception as error:
            raise ReplayError(
                f"the layer {name!r} needs values to be recorded, and fails with zeros in their "
                f"place ({type(error).__name__}: {str(error)[:200]}); let it take zeros"
            ) from error
        finally:
            map_tensors((args, kwargs), lambda t: back.get(id(t), t))  # in the caller's lists
        tensors, rebuild = tensors_of(y)
        found = [
            back[id(t)] if id(t) in back else placeholder_of(t, needs_grad) for t in tensors
        ]
        return rebuild(tuple(found))


def _as_numbers(index: Any) -> Any:
    """Return an index whose real masks are replaced by the numbers of the rows they select."""
    found: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(item, Tensor) and item.dtype == torch.bool and not item.is_meta
        found += item.nonzero(as_tuple=True) if is_mask else [item]
    return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]
