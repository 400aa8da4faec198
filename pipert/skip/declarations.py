"""Finds the skips that layers declare, and checks that stashes and pops match.

A skip goes from the partition that stashes it straight to the next one that pops it, and from there
to the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from pipert.skip.namespace import Key, show
from pipert.skip.skippable import Skippable

__all__ = ["verify_skippables"]


def keys_of(module: nn.Sequential) -> tuple[Key, ...]:
    """Return the skips that layers of a module, such as a partition, stash or pop."""
    return tuple(dict.fromkeys([one.key for unit in declarations(module) for one in unit]))


class Declared(NamedTuple):
    """The declaration that a layer stashes or pops a skip."""

    key: Key
    path: str
    """The layer's name in the outermost Sequential."""
    is_stash: bool
    pops: int = 0
    """Of a stash: the number of layers that pop it."""


def declarations(module: nn.Sequential) -> Iterator[list[Declared]]:
    """Yields the layers' declarations in the order they run, one group per unit.

    Nested Sequentials run in order. Any other layer is a unit, whose submodules may run in any
    order.
    """
    for path, unit in _units(module, ""):
        yield list(_declared_in(unit, path))


def _units(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for name, child in module._modules.items():
            if child is not None:
                yield from _units(child, f"{path}.{name}".lstrip("."))
    else:
        yield path, module


def _declared_in(module: nn.Module, path: str) -> Iterator[Declared]:
    if getattr(module, "is_pipe", False):
        return  # a nested pipe's skips are its own
    if isinstance(module, Skippable):
        for name, pops in module.skip_stashes.items():
            yield Declared(module.skip_key(name), path, True, pops)
        for name in sorted(module.skip_pops):
            yield Declared(module.skip_key(name), path, False)
    # Not named_modules: a module that appears twice runs twice.
    for name, child in module._modules.items():
        if child is not None:
            yield from _declared_in(child, f"{path}.{name}".lstrip("."))


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each stash is popped later, as often as declared, and each pop stashed before.

    ``Pipe`` makes this check itself.

    Raises:
        TypeError: stashes and pops do not match. The message lists all mismatches.
    """
    stashes: dict[Key, Declared] = {}
    pops: dict[Key, list[Declared]] = {}
    ambiguous: set[Key] = set()
    problems = [
        f"layer {name!r} has a generator for its forward, and {type(layer).__qualname__} is not "
        "decorated with @skippable(stash=[...], pop=[...])"
        for name, layer in module.named_modules()
        if inspect.isgeneratorfunction(inspect.getattr_static(type(layer), "forward", None))
    ]
    for unit in declarations(module):
        for new in (declared for declared in unit if declared.is_stash):
            first = stashes.setdefault(new.key, new)
            if first is not new:
                ambiguous.add(new.key)
                problems.append(
                    f"layer {new.path!r} stashes {show(new.key)}, as layer {first.path!r} does; "
                    "isolate the layers of each in a Namespace of their own"
                )
        for new in (declared for declared in unit if not declared.is_stash):
            pops.setdefault(new.key, []).append(new)
            if new.key not in stashes:
                problems.append(
                    f"layer {new.path!r} pops {show(new.key)}, which no layer before it stashes"
                )
            elif any(d.is_stash and d.path == new.path and d.key == new.key for d in unit):
                problems.append(f"layer {new.path!r} both stashes and pops {show(new.key)}")
    for key, stash in stashes.items():
        poppers = [pop.path for pop in pops.get(key, [])]
        if len(poppers) != stash.pops and key not in ambiguous:
            by = ", ".join(map(repr, poppers))
            problems.append(
                f"layer {stash.path!r} stashes {show(key)} for {stash.pops} to pop, but "
                f"{len(poppers)} do: {by}; isolate pairs of layers in Namespaces of their own, or "
                f"declare stash={{{key[1]!r}: {len(poppers)}}}"
                if poppers
                else f"layer {stash.path!r} stashes {show(key)}, which no layer pops"
            )
    if problems:
        raise TypeError(
            "the stashes and pops of the layers do not match:\n\n"
            + "\n".join(f"* {problem}" for problem in problems)
        )
