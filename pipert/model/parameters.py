"""Builds a model without memory for its parameters, and loads each one where it belongs.

Nothing of a model is replaced before all values are there: if a name is missing, a file is damaged,
a device is full or the user interrupts, the model is as before, and what was loaded is dropped.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import hooks_on_grad, tensor_hooks

__all__ = ["empty_parameters"]

Load = Callable[[str], Tensor | None] | str | os.PathLike[str]
META = torch.device("meta")
_lock = threading.RLock()


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Build models in the block with parameters that take no memory; buffers get their values.

    Give the model to :func:`pipeline`, or to that of :mod:`pipert.distributed`, with ``load=``.
    Initialising a parameter does nothing. Parameters are tied as usual. Other threads build models
    as always; one that enters such a block waits.

    >>> with pipert.empty_parameters():
    ...     layer = torch.nn.Linear(2, 2)
    >>> layer.weight.device.type
    'meta'
    """
    with _lock:
        register, owner = nn.Module.register_parameter, threading.get_ident()
        # A parameter that is registered twice stays one. Real ones are not kept alive.
        metas: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

        def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            is_here = threading.get_ident() == owner
            if is_here and parameter is not None and not parameter.is_meta:
                real, made = metas.get(id(parameter), (lambda: None, parameter))
                if real() is not parameter:
                    made = _like(parameter, parameter.detach().to(META))
                    metas[id(parameter)] = weakref.ref(parameter), made
                parameter = made
            register(self, name, parameter)

        setattr(nn.Module, "register_parameter", on_meta)  # noqa: B010
        try:
            yield
        finally:
            setattr(nn.Module, "register_parameter", register)  # noqa: B010


def materialise(
    model: nn.Module, device_of: Callable[[Tensor], torch.device], load: Load | None
) -> dict[Tensor, Tensor]:
    """Make parameters and buffers on their devices, with values by their names.

    Args:
        model: the model, which stays as it is.
        device_of: returns the device of a parameter or buffer; the meta device for a parameter
            whose values are not needed.
        load: the values of parameters and of buffers that belong to the state. ``None`` keeps those
            there are; parameters on meta then get memory without values.

    Returns:
        The new one for each parameter and buffer, which may be itself.

    Raises:
        ValueError: values are missing, have other shapes, or belong to no name of the model; the
            message has all of them. Or a parameter that gets other memory has hooks.
        TypeError, ImportError: as for reading ``load``; or a value is a quantised weight.
        OSError: a file of a checkpoint is damaged.
        OutOfMemoryError: a device is full; a note says what was loaded.
    """
    names = _names(model)
    wanted = {tensor: called for tensor, called in names.items() if device_of(tensor) != META}
    values = {} if load is None else _values(model, names, wanted, device_of, load)
    new: dict[Tensor, Tensor] = {}
    for tensor, called in names.items():
        made = values.pop(tensor, tensor)
        if made.is_meta and tensor in wanted:
            made = torch.empty_like(tensor, device=device_of(tensor))
        made = made.to(device_of(tensor))
        if made is not tensor and isinstance(tensor, nn.Parameter):
            if tensor in wanted and (tensor_hooks(tensor) or hooks_on_grad(tensor)):
                raise ValueError(
                    f"the parameter {called[0]!r} has hooks, which would be lost when it gets its "
                    "values; register them once there is a pipe"
                )
            made = _like(tensor, made.detach())
        new[tensor] = made
    return new


def replace(model: nn.Module, new: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters and buffers of a model by others, wherever they are registered."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            tensors: dict[str, Any] = {k: new.get(t, t) for k, t in table.items() if t is not None}
            table.update(tensors)


def _names(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return all names of each parameter and buffer; none of a buffer that is not in the state.

    Raises:
        ValueError: such a buffer is on the meta device.
    """
    names = defaultdict[Tensor, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                path = f"{prefix}.{name}".lstrip(".")
                is_state = name not in module._non_persistent_buffers_set
                if buffer.is_meta and not is_state:
                    raise ValueError(
                        f"the buffer {path!r} is on the meta device, without a value, and is in no "
                        "checkpoint; build the model in pipert.empty_parameters()"
                    )
                names[buffer] += [path] * is_state
    return dict(names)


def _values(
    model: nn.Module, names: Mapping[Tensor, list[str]], wanted: Mapping[Tensor, list[str]],
    device_of: Callable[[Tensor], torch.device], load: Load,
) -> dict[Tensor, Tensor]:  # fmt: skip
    """Return the values of the ``wanted`` tensors, each on its device and of its dtype."""
    tensor_of = {name: tensor for tensor, called in wanted.items() for name in called}
    value_of, shapes = (load, None) if callable(load) else _opened(load)
    wrong = "" if shapes is None else _misfits(names, wanted, shapes)
    order = [name for name in shapes or tensor_of if name in tensor_of]
    found, seen = dict[Tensor, Tensor](), dict[str, torch.Size]()
    for name in _progress(order) if not wrong else ():
        tensor = tensor_of[name]
        if tensor in found or (value := value_of(name)) is None:
            continue
        if not torch.can_cast(tensor.dtype, value.dtype):
            raise TypeError(
                f"load gives {value.dtype} for {name!r}, which is {tensor.dtype} in the model; if "
                "the checkpoint is quantised, use from_pretrained(folder, device_map='auto')"
            )
        seen[name] = value.shape
        if value.shape == tensor.shape:
            try:
                # A copy, since it may be a tensor of another model.
                found[tensor] = value.detach().to(device_of(tensor), tensor.dtype, copy=True)
            except torch.OutOfMemoryError as error:
                where = device_of(tensor)
                got = sum([value.nbytes for value in found.values() if value.device == where])
                all_there = sum([each.nbytes for each in wanted if device_of(each) == where])
                error.add_note(
                    f"while {name!r} was loaded to {where}, which has got {got} of {all_there} "
                    "bytes of parameters and buffers; use more devices, or the cuts of a plan"
                )
                raise
    if shapes is None:
        wrong = _misfits(names, wanted, seen)
    if wrong:
        advice = "; if transformers renames the keys of this checkpoint as it loads them, use "
        advice += "from_pretrained(folder, device_map=plan.device_map)"
        raise ValueError(f"load does not fit: {wrong}{advice * hasattr(model, 'from_pretrained')}")
    return found


def _misfits(
    names: Mapping[Tensor, list[str]], wanted: Mapping[Tensor, list[str]],
    shapes: Mapping[str, Sequence[int]],
) -> str:  # fmt: skip
    """Describe names that are not there, shapes that differ, and names that nothing has."""
    known = {name for called in names.values() for name in called}
    missing = [
        called[0] for tensor, called in wanted.items()
        if tensor.is_meta and not any(name in shapes for name in called)
    ]  # fmt: skip
    others = [
        f"{name}: {tuple(shapes[name])}, in the model {tuple(tensor.shape)}"
        for tensor, called in wanted.items()
        for name in called
        if tuple(shapes.get(name, tensor.shape)) != tuple(tensor.shape)
    ]
    found = {
        "missing are": missing,
        "not in the model are": [name for name in shapes if name not in known],
        "of other shapes are": others,
    }
    return "; ".join([f"{what} {those}" for what, those in found.items() if those])


def _opened(
    path: str | os.PathLike[str],
) -> tuple[Callable[[str], Tensor], dict[str, Sequence[int]]]:
    """Open a checkpoint; return what reads a tensor by its name, and all shapes in their order."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"load must be a function such as state.get, or a path, got {type(path)}")
    where = Path(path)
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
    for index in where.glob("*.safetensors.index.json"):  # beside which may be other formats
        files = [where / name for name in {*json.loads(index.read_text())["weight_map"].values()}]
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ValueError(
            f"load must be a folder of .safetensors files, or one of them, got {where}; a .bin or "
            ".pt file is a pickle, which may run code and is read as a whole: load it yourself and "
            "pass a function of the name, such as torch.load(path, mmap=True).get"
        )
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"files of the checkpoint {where} are not there: {missing}")
    if find_spec("safetensors") is None:
        raise ImportError("load= of a path needs safetensors: pip install safetensors")
    safe_open = import_module("safetensors").safe_open
    shapes, files_of = dict[str, Sequence[int]](), dict[str, Any]()
    for file in sorted(files):
        try:
            opened = safe_open(file, framework="pt")
            shapes.update({name: opened.get_slice(name).get_shape() for name in opened.keys()})
        except Exception as error:
            error.add_note(f"while {file} was opened, which may be damaged")
            raise
        files_of.update(dict.fromkeys(opened.keys(), opened))
    return lambda name: files_of[name].get_tensor(name), shapes


def _progress(names: Sequence[str]) -> Iterable[str]:
    """Return the names, and show on a terminal how far they are read, if tqdm is there."""
    if find_spec("tqdm") is None:
        return names
    bar: Iterable[str] = import_module("tqdm").tqdm(names, "loading", disable=None)
    return bar


def _like(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return a parameter of the same kind, with the same attributes."""
    kind: type[nn.Parameter] = type(parameter)
    made = kind(value, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
