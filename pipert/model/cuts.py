"""Where a model is cut, its layers, and the partition in which each of them lives.

A *cut* is a module: the first call of cut *j* begins partition *j + 1*. Partition 0 begins with
the model. *Layers* are what a partition consists of: the maximal modules that are called and have
no cut strictly inside of them. Everything around a layer that is no layer itself is a *container*:
a module with a cut inside, whose own code is *glue* and runs in the partition that is current, or
one that is never called, such as a ``ModuleList``.

A layer's *home* is the partition in which it is called first. There its parameters live; where it
is called again does not matter. Whether modules are called in the order of their registration is
the model's own affair (rotary embeddings are registered last and called first), so homes follow
the calls of a dry run where there was one.
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
    """The names of the modules at which a model is cut, checked; partition 0 has none.

    Raises:
        TypeError: ``names`` is no iterable of strings.
        ValueError: a name is no module's, one is given twice, or nothing can begin there.
    """

    __slots__ = ()

    def __new__(cls, model: nn.Module, names: Iterable[str]) -> Cuts:
        """Check ``names``, which are as in ``model.named_modules()``."""
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
        return tuple, (tuple(self),)  # what is checked by a model is no more in a copy


def _mistakes(model: nn.Module, names: Sequence[str]) -> list[str]:
    """What is wrong with ``names``, each with its remedy."""
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
                f"the cut {name!r} is {_a(module)}, which is never called; "
                + _instead(name, module)
            )
    if found:
        return found
    compiled = [text for name in names for text in _compiled(model, name)]
    return _nested({known[name]: name for name in names}) + compiled


def _advice(name: str, known: Iterable[str]) -> str:
    """Which of the ``known`` names might be meant."""
    end = [other for other in known if other.endswith(f".{name}") or name.endswith(f".{other}")]
    close = list(dict.fromkeys(end + difflib.get_close_matches(name, known)))[:3]
    if not close:
        return "; give a name as in model.named_modules()"
    return "; did you mean " + " or ".join(map(repr, close)) + "?"


def _a(module: nn.Module) -> str:
    kind = type(module).__qualname__
    return f"an {kind}" if kind[0] in "AEIOU" else f"a {kind}"


def _instead(name: str, module: nn.Module) -> str:
    """What to give for a container."""
    first = next((own for own, inner in module.named_modules() if is_called(inner)), None)
    if first is None:
        return "give a module that is"
    kind = "element" if isinstance(module, nn.ModuleList) else "module"
    return f"name its first {kind}, {f'{name}.{first}'!r}"


def _nested(cuts: Mapping[nn.Module, str]) -> list[str]:
    """The cuts that are inside of others, under any name."""
    return [
        f"the cut {cuts[inner]!r} is inside the cut {name!r}, which would be in two partitions; "
        "leave one out"
        for module, name in cuts.items()
        for inner in modules_of(module)
        if inner is not module and inner in cuts
    ]


def _compiled(model: nn.Module, name: str) -> list[str]:
    """Whether one of the containers of a cut is compiled or scripted."""
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
    """The module of that name, under any of its names."""
    module: nn.Module | None = model
    for part in name.split(".") if name else ():
        inner = {} if module is None else dict(module._modules.items())
        module = inner.get(part)
    return module


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` can be called at all: a ``ModuleList`` has no ``forward``."""
    # Its function, because others put it on the object, bound, and so it is found in both places.
    return getattr(getattr(module, "forward", None), "__func__", 0) is not nn.Module.forward


def layers_of(model: nn.Module, cuts: Iterable[str]) -> dict[str, nn.Module]:
    """Return the maximal modules that are called and have no cut strictly inside, by name.

    In the order of registration; each object once, under its first name. Without cuts that is the
    model, under ``''``.

    Args:
        model: the model.
        cuts: names, as :class:`Cuts` has checked them.
    """
    at = {model.get_submodule(name) for name in cuts}
    found: dict[nn.Module, str] = {}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if is_called(module) and not _has_inside(module, at):
            found[module] = name
            return
        for own, child in module._modules.items():
            if child is not None:
                visit(_joined(name, own), child)

    visit("", model)
    return {name: module for module, name in found.items()}


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _has_inside(module: nn.Module, some: set[nn.Module]) -> bool:
    return any(inner in some for inner in modules_of(module) if inner is not module)


def homes(
    layers: Mapping[str, nn.Module], cuts: Sequence[str], order: Iterable[str] | None = None
) -> dict[str, int]:
    """Return the partition in which each layer lives, in the order of ``layers``.

    Args:
        layers: from :func:`layers_of`.
        cuts: the cuts that they are from.
        order: the names of layers in the order of their first calls. Those that are missing, which
            a dry run has not called, live where the layer registered before them does (where none
            is, the one behind). ``None`` is the order of registration, in which every layer lives
            where the last cut before it begins.

    Raises:
        ValueError: the cuts are not in the order of their first calls, one was never called, or
            no layer is called before the first.
    """
    begins = {name: j for j, name in enumerate(cuts, 1)}
    if order is None:
        called = list(layers)
    else:
        called = list(dict.fromkeys(order))
        _check_order(cuts, called)
    found: dict[str, int] = {}
    current = 0
    for name in called:
        current = begins.get(name, current)
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
    own = [name for name in called if name in cuts]
    if list(cuts) != own:
        raise ValueError(
            f"cuts must be in the order of their first calls, which is {own}, got {list(cuts)}"
        )
    if cuts and called[0] == cuts[0]:
        raise ValueError(
            f"the cut {cuts[0]!r} is the first layer that is called, so partition 0 would have "
            "none; leave it out, as that partition begins with the model"
        )


def glue_homes(
    model: nn.Module, layers: Mapping[str, nn.Module], cuts: Sequence[str], of: Mapping[str, int]
) -> dict[str, int]:
    """Return the partitions of the parameters and buffers that are no layer's, by their names.

    Such a one belongs to a container itself, such as a model's own ``pos_embed``, and is used by
    glue. When is unknown, so its home is the partition that is current when its container is
    called; that is 0 for those of the model, and wherever it is used it can be copied to.

    Args:
        model, layers, cuts: as in :func:`layers_of` and its result.
        of: the homes of the layers.
    """
    place = {module: of[name] for name, module in layers.items()}
    at = {model.get_submodule(name): j for j, name in enumerate(cuts, 1)}
    found: dict[str, int] = {}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module, home: int) -> None:
        if module in place or module in seen:
            return
        seen.add(module)
        inside = modules_of(module)
        first = min((place[inner] for inner in inside if inner in place), default=None)
        if first is not None and is_called(module):
            # Its first partition begins in it, or has begun before.
            home = first - any(at.get(inner) == first for inner in inside)
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[_joined(name, own)] = home
        for own, child in module._modules.items():
            if child is not None:
                visit(_joined(name, own), child, home)

    visit("", model, 0)
    return found
