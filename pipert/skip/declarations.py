"""Finds the skips that layers declare, and checks that stashes and pops match.

A skip goes from the partition that stashes it straight to the one that pops it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from pipert.skip.skippable import Skippable
from pipert.skip.store import Key, show

__all__ = ["verify_skippables"]


def keys_of(module: nn.Sequential) -> tuple[Key, ...]:
    """Return the skips that layers of a module, such as a partition, stash or pop."""
    units = _units(module, "")
    return tuple(dict.fromkeys([one.key for unit in units for one in _declared_in(*unit)]))


class Declared(NamedTuple):
    """The declaration that a layer stashes or pops a skip."""

    key: Key
    path: str
    """The layer's name in the outermost Sequential."""
    is_stash: bool


def _units(module: nn.Module, path: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield what runs in a known order, with its path: the layers of nested Sequentials."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for name, child in module._modules.items():
            if child is not None:
                yield from _units(child, f"{path}.{name}".lstrip("."))
    else:
        yield module, path


def _declared_in(module: nn.Module, path: str) -> Iterator[Declared]:
    if getattr(module, "is_pipe", False):
        return  # a nested pipe's skips are its own
    if isinstance(module, Skippable):
        for is_stash, names in (True, module.skip_stashes), (False, module.skip_pops):
            for name in sorted(names):
                yield Declared(module.skip_key(name), path, is_stash)
    # Not named_modules: a module that appears twice runs twice.
    for name, child in module._modules.items():
        if child is not None:
            yield from _declared_in(child, f"{path}.{name}".lstrip("."))


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each stash is popped once, later, and each pop stashed before.

    ``Pipe`` makes this check itself.

    >>> verify_skippables(nn.Sequential(Stash(), nn.Linear(8, 8), PopAdd()))

    Raises:
        TypeError: stashes and pops do not match. The message lists all mismatches.
    """
    stashes: dict[Key, Declared] = {}
    pops: dict[Key, Declared] = {}
    problems = list[str]()
    for unit in _units(module, ""):
        for new in sorted(_declared_in(*unit), key=lambda declared: not declared.is_stash):
            first = (stashes if new.is_stash else pops).setdefault(new.key, new)
            does = f"layer {new.path!r} {'stashes' if new.is_stash else 'pops'} {show(new.key)}"
            if not new.is_stash and new.key not in stashes:
                problems.append(f"{does}, which no layer before it stashes")
            elif not new.is_stash and stashes[new.key].path == new.path:
                problems.append(f"layer {new.path!r} both stashes and pops {show(new.key)}")
            elif first is not new:
                problems.append(
                    f"{does}, as layer {first.path!r} does; isolate each pair of layers in a "
                    "Namespace of its own, and stash what two layers pop under two names"
                )
    problems += [
        f"layer {stash.path!r} stashes {show(key)}, which no layer pops"
        for key, stash in stashes.items()
        if key not in pops
    ]
    if problems:
        raise TypeError(
            "the stashes and pops of the layers do not match:\n\n"
            + "\n".join(f"* {problem}" for problem in problems)
        )
