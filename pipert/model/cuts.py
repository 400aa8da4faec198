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

from pipert.layers.drawing import is_compiled_itself
from pipert.layers.modules import modules_of

__all__: list[str] = []


class Cuts(tuple[str, ...]):
    """The checked names of the modules at which a model is cut; partition 0 has none.

    Raises:
        TypeError: ``names`` is not an iterable of strings.
        ValueError: a name belongs to no module or is given twice, or no partition can begin there.
    """

    __slots__ = ()

    def __new__(cls, model: nn.Module, names: Iterable[str]) -> Cuts:
        """Check ``names``, which are those of ``model.named_modules()``."""
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(
                f"cuts must be an iterable of names of modules, got {names!r}; give a list of them"
            )
        given = list(names)
        if strange := [name for name in given if not isinstance(name, str)]:
            raise TypeError(
                f"cuts must be names of modules, got {strange[0]!r}; give names as in "
                "model.named_modules()"
            )
        if wrong := _mistakes(model, given):
            raise ValueError("; ".join(wrong))
        return super().__new__(cls, given)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # a copy is not checked against its model


def _mistakes(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Describe each mistake in ``names`` and its remedy."""
    known = dict(model.named_modules())
    first = {module: name for name, module in known.items()}
    found = []
    for k, name in enumerate(names):
        module = lookup(model, name)
        if name == "":
            found.append("the cut '' is the whole model, which partition 0 begins; leave it out")
        elif name in names[:k]:
            found.append(f"the cut {name!r} is given twice; leave one out")
        elif module is None:
            found.append(f"the model has no module {name!r}" + _advice(name, known))
        elif first[module] != name:
            found.append(
                f"the cut {name!r} is the same module as {first[module]!r}; if partition {k + 1} "
                "begins with its first call, give that name, else another module"
            )
        elif not is_called(module):
            found.append(
                f"the cut {name!r} is {_with_article(module)}, which is never called; "
                + _instead(name, module)
            )
    if found:
        return found
    compiled = [text for name in names for text in _compiled(model, name)]
    return _nested({known[name]: name for name in names}) + compiled


def _advice(name: str, known: Iterable[str]) -> str:
    """Suggest ``known`` names that might be meant."""
    same_end = [one for one in known if one.endswith(f".{name}") or name.endswith(f".{one}")]
    close = list(dict.fromkeys(same_end + difflib.get_close_matches(name, known)))[:3]
    if not close:
        return "; give a name as in model.named_modules()"
    return "; did you mean " + " or ".join(map(repr, close)) + "?"


def _with_article(module: nn.Module) -> str:
    kind = type(module).__qualname__
    return f"an {kind}" if kind[0] in "AEIOU" else f"a {kind}"


def _instead(name: str, module: nn.Module) -> str:
    """Suggest a cut in place of a container that is never called."""
    first = next((path for path, inner in module.named_modules() if is_called(inner)), None)
    if first is None:
        return "give a module that is"
    kind = "element" if isinstance(module, nn.ModuleList) else "module"
    return f"name its first {kind}, {f'{name}.{first}'!r}"


def _nested(cuts: Mapping[nn.Module, str]) -> list[str]:
    """Describe the cuts that are inside other cuts, under any name."""
    return [
        f"the cut {cuts[inner]!r} is inside the cut {name!r}, which would be in two partitions; "
        "leave one out"
        for module, name in cuts.items()
        for inner in modules_of(module)
        if inner is not module and inner in cuts
    ]


def _compiled(model: nn.Module, name: str) -> list[str]:
    """Describe the outermost container of a cut that is compiled or scripted, if any is."""
    path = name.split(".")
    for k in range(len(path)):
        outer = ".".join(path[:k])
        container = lookup(model, outer)
        if container is not None and is_compiled_itself(container):
            whole = f"{outer!r}" if outer else "the model"
            return [
                f"the cut {name!r} is inside {whole}, which is compiled or scripted and calls it "
                "unseen; compile the layers between the cuts instead"
            ]
    return []


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
        cuts: names that :class:`Cuts` has checked.
    """
    cut_modules = {model.get_submodule(name) for name in cuts}
    found: dict[nn.Module, str] = {}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if is_called(module) and not _has_inside(module, cut_modules):
            found[module] = name
            return
        for child_name, child in module._modules.items():
            if child is not None:
                visit(_joined(name, child_name), child)

    visit("", model)
    return {name: module for module, name in found.items()}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _has_inside(module: nn.Module, cuts: set[nn.Module]) -> bool:
    return any(inner in cuts for inner in modules_of(module) if inner is not module)


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
            f"the cuts {missing} were not called, so no partition begins there; give modules that "
            "the model calls with arguments like these, by module(...) and not by a method of "
            "theirs, and does not skip at random as LayerDrop does"
        )
    in_order = [name for name in called if name in cuts]
    if list(cuts) != in_order:
        raise ValueError(
            f"cuts must be in the order of their first calls, which is {in_order}, got {list(cuts)}"
        )
    if cuts and called[0] == cuts[0]:
        raise ValueError(
            f"the cut {cuts[0]!r} is the first layer that is called, so partition 0 would have "
            "none; leave it out, as that partition begins with the model"
        )


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
