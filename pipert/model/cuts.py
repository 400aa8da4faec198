"""Finds the layers of a model that is cut, and the partition in which each layer lives.

A *cut* is a module: the first call of cut *j* begins partition *j + 1*. Partition 0 begins with
the model. A partition consists of *layers*: the maximal modules that are called and have no cut
strictly inside. The modules around layers are *containers*: a module with a cut inside, whose own
code runs in the partition that is current, or a module that is never called, such as
a ``ModuleList``.

A layer's *home* is the partition in which it is called first. Its parameters live there, wherever
it is called again. Models need not call modules in the order of registration (rotary embeddings are
registered last and called first), so homes follow the calls of a dry run, if there was one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from pipert.layers.compiling import is_compiled_itself
from pipert.layers.modules import modules_of
from pipert.skip.declarations import keys_of


def check_cuts(model: nn.Module, names: Any) -> tuple[str, ...]:
    """Return the names of the modules at which a model is cut; partition 0 has none.

    Raises:
        TypeError: ``names`` are not names, as in ``model.named_modules()``; or layers stash skips.
        ValueError: a name belongs to no module or is given twice, or no partition can begin there.
    """
    known = dict(model.named_modules())
    is_one = isinstance(names, str | nn.Module) or not isinstance(names, Iterable)
    given: tuple[Any, ...] = (names,) if is_one else tuple(names)
    if is_one or not all(isinstance(name, str) for name in given):
        raise TypeError(
            f"cuts must be a list of names, as in model.named_modules(), got {names!r}; for a "
            "number of partitions, write partitions=2 and example=batch"
        )
    first = {module: name for name, module in known.items()}
    found = []
    for k, name in enumerate(given):
        module = lookup(model, name)
        if name == "":
            found.append("the cut '' is the whole model, which partition 0 begins; leave it out")
        elif name in given[:k]:
            found.append(f"the cut {name!r} is given twice; leave one out")
        elif module is None:
            close = " or ".join(map(repr, difflib.get_close_matches(name, known)))
            meant = f"; did you mean {close}?" if close else ""
            found.append(f"the model has no module {name!r}{meant}")
        elif first[module] != name:
            found.append(f"the cut {name!r} is the same module as {first[module]!r}; name that")
        elif not is_called(module):
            kind = type(module).__qualname__
            found.append(f"the cut {name!r} ({kind}) is never called; name a module inside it")
    if found := found or _unseen(model, {known[name]: name for name in given}):
        raise ValueError("; ".join(found))
    if keys_of(nn.Sequential(model)):
        raise TypeError(
            "the model has layers that stash and pop skips, which are for an nn.Sequential; pass "
            "the tensors in the model's own code, or make a Pipe"
        )
    return given


def _unseen(model: nn.Module, cuts: Mapping[nn.Module, str]) -> list[str]:
    """Describe the cuts inside other cuts, under any name, and inside compiled containers."""
    found = [
        f"the cut {cuts[inner]!r} is inside the cut {name!r}, which would be in two partitions; "
        "leave one out"
        for module, name in cuts.items()
        for inner in modules_of(module)
        if inner is not module and inner in cuts
    ]
    for name in cuts.values():
        path = name.split(".")
        for outer in (".".join(path[:k]) for k in range(len(path))):
            container = lookup(model, outer)
            if container is not None and is_compiled_itself(container):
                found.append(
                    f"the cut {name!r} is inside {repr(outer) if outer else 'the model'}, which is "
                    "compiled or scripted and calls it unseen; compile the layers instead"
                )
                break
    return found


def lookup(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module that has ``name`` as one of its names; ``None`` if there is none."""
    module: nn.Module | None = model
    for part in name.split(".") if name else ():
        children = {} if module is None else dict(module._modules.items())  # no dict if scripted
        module = children.get(part)
    return module


def is_called(module: nn.Module) -> bool:
    """Return whether ``module`` can be called at all: a ``ModuleList`` has no ``forward``."""
    # Compares functions, since libraries such as accelerate put a bound forward on the object.
    return getattr(getattr(module, "forward", None), "__func__", 0) is not nn.Module.forward


def layers_of(model: nn.Module, cuts: Iterable[str]) -> dict[str, nn.Module]:
    """Return the maximal modules that are called and have no cut strictly inside, by name.

    They are in the order of registration, each once under its first name. Without cuts, the only
    layer is the model, named ``''``.

    Args:
        model: the model.
        cuts: names that :func:`check_cuts` has checked.
    """
    cut_modules = {model.get_submodule(name) for name in cuts}
    found: dict[nn.Module, str] = {}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if is_called(module) and cut_modules.isdisjoint({*modules_of(module)} - {module}):
            found[module] = name
            return
        for child_name, child in module._modules.items():
            if child is not None:
                visit(_joined(name, child_name), child)

    visit("", model)
    return {name: module for module, name in found.items()}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def homes(
    layers: Mapping[str, nn.Module], cuts: Sequence[str], order: Iterable[str] | None = None
) -> dict[str, int]:
    """Return the partition in which each layer lives, in the order of ``layers``.

    Args:
        layers: the layers, from :func:`layers_of`.
        cuts: the cuts that were given to it.
        order: the names of layers in the order of their first calls in a dry run. A layer that was
            not called lives with the one registered before it (if there is none, with the next
            that was called). ``None`` takes the order of registration: a layer lives in the
            partition of the last cut up to it.

    Raises:
        ValueError: the cuts are not in the order of their first calls, one was never called, or
            no layer is called before the first cut.
    """
    partition_of = {name: j for j, name in enumerate(cuts, 1)}
    if order is None:
        called = list(layers)
    else:
        called = list(dict.fromkeys(order))
        _check_order(cuts, called)
    found: dict[str, int] = {}
    current = 0
    for name in called:
        current = partition_of.get(name, current)
        found[name] = current
    current = next((found[name] for name in layers if name in found), 0)
    for name in layers:
        current = found.setdefault(name, current)
    return {name: found[name] for name in layers}


def _check_order(cuts: Sequence[str], called: Sequence[str]) -> None:
    if missing := [name for name in cuts if name not in called]:
        raise ValueError(
            f"the cuts {missing} were not called, or only inside other layers, so no partition "
            "begins there; give modules that the model calls, by module(...), for each batch; if "
            "it drops layers, call eval() first"
        )
    in_order = [name for name in called if name in cuts]
    if list(cuts) != in_order:
        raise ValueError(
            f"cuts must be in the order of their first calls, which is {in_order}, got {list(cuts)}"
        )
    if cuts and called[0] == cuts[0]:
        raise ValueError(
            f"the cut {cuts[0]!r} is the first layer that is called, where partition 0 begins; "
            "leave it out"
        )


def within(layers: Mapping[str, nn.Module], order: Iterable[str]) -> list[str]:
    """Return the ``layers`` in which those of an ``order`` of calls are, or which they are."""
    found: dict[str, None] = {}
    for name in order:
        path = name.split(".")
        around = [".".join(path[:k]) for k in range(len(path) + 1)]
        found.update(dict.fromkeys(filter(layers.__contains__, around)))
    return [*found]


def homes_outside_of_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    cuts: Sequence[str],
    layer_homes: Mapping[str, int],
) -> dict[str, int]:
    """Return the partition of each parameter and buffer that belongs to no layer, by its name.

    They belong to containers, such as a model's own ``pos_embed``, and it is unknown when the
    container's own code uses them. So their home is the partition that is current when the
    container is called, which is 0 for the model; other partitions can use copies.

    Args:
        model, layers, cuts: as in :func:`layers_of` and its result.
        layer_homes: the homes of the layers.
    """
    home_of = {module: layer_homes[name] for name, module in layers.items()}
    partition_of = {model.get_submodule(name): j for j, name in enumerate(cuts, 1)}
    found: dict[str, int] = {}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module, home: int) -> None:
        if module in home_of or module in seen:
            return
        seen.add(module)
        inside = modules_of(module)
        first = min((home_of[inner] for inner in inside if inner in home_of), default=None)
        if first is not None and is_called(module):
            # If that partition begins inside the container, its call begins in the one before.
            home = first - any(partition_of.get(inner) == first for inner in inside)
        for tensor_name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[_joined(name, tensor_name)] = home
        for child_name, child in module._modules.items():
            if child is not None:
                visit(_joined(name, child_name), child, home)

    visit("", model, 0)
    return found
