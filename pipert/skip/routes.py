"""Routes skips from the partition that stashes them straight to those that pop them.

First it checks that the stashes and pops that layers declare match, in the order the layers run.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from pipert._typing import Value
from pipert.skip.namespace import Key, show
from pipert.skip.skippable import Skippable
from pipert.skip.store import ABSENT, Entry, Store

__all__ = ["verify_skippables"]


@dataclass(frozen=True)
class PartitionSkips:
    """The skips of one partition."""

    arriving: tuple[tuple[Key, int], ...]
    """The skips popped here and stashed elsewhere, each with the stashing partition."""
    leaving: tuple[tuple[Key, int], ...]
    """The skips stashed here and popped elsewhere, each with the popping partition. A skip that
    several partitions pop appears once for each: its gradients arrive on separate streams, and may
    be added only after the nodes that wait for these."""
    pops: Mapping[Key, int]
    """How many layers of this partition pop each skip; 0 for those only stashed here."""

    def __bool__(self) -> bool:
        return bool(self.pops)

    def entries(self, arriving: Sequence[Value]) -> tuple[Entry, ...]:
        """Return what arrives as the entries of a store, to be popped here or sent on."""
        sent = Counter([key for key, _ in self.leaving])
        pairs = zip(self.arriving, arriving, strict=True)
        return tuple(
            [(key, self.pops[key] + sent[key], x) for (key, _), x in pairs if x is not ABSENT]
        )

    def store(self, entries: Sequence[Entry]) -> Store:
        """Makes the store for layers of the partition, filled with ``entries``."""
        return Store(self.pops, [key for key, _ in self.leaving], entries)

    def leave(self, entries: Sequence[Entry]) -> tuple[Value, ...]:
        """Return what leaves; ``ABSENT`` where the stashing layer did not run."""
        store = self.store(entries)
        return tuple([store.send(key) for key, _ in self.leaving])


def routes(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips, ...]:
    """Find the skips of each partition.

    The stashes and pops must match (``verify_skippables``).
    """
    source: dict[Key, int] = {}
    pops: dict[Key, dict[int, int]] = {}  # of each skip, in each partition that declares it
    for j, partition in enumerate(partitions):
        for unit in declarations(partition):
            for declared in unit:
                counts = pops.setdefault(declared.key, {})
                counts[j] = counts.get(j, 0) + (not declared.is_stash)
                if declared.is_stash:
                    source[declared.key] = j
    found = []
    for j in range(len(partitions)):
        local = {key: counts[j] for key, counts in pops.items() if j in counts}
        arriving = [(key, source[key]) for key in local if source[key] != j]
        stashed = [key for key in local if source[key] == j]
        leaving = [(key, k) for key in stashed for k in sorted(pops[key]) if k != j]
        found.append(PartitionSkips(tuple(arriving), tuple(leaving), local))
    return tuple(found)


def routes_along(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips, ...]:
    """Find the skips of each partition where a skip passes through all partitions on its way.

    A skip arrives at each partition after the one that stashes it, up to the last that pops it,
    and leaves for the next one. Partitions that only pass a skip on pop it 0 times.
    """
    straight = routes(partitions)
    hops = [(key, j, k) for j, skips in enumerate(straight) for key, k in skips.leaving]
    first = {key: j for key, j, _ in hops}
    last = {key: k for key, _, k in hops}  # of several hops of a skip, the farthest comes last
    found = []
    for j, skips in enumerate(straight):
        arriving = tuple([(key, j - 1) for key in first if first[key] < j <= last[key]])
        leaving = tuple([(key, j + 1) for key in first if first[key] <= j < last[key]])
        pops = {**dict.fromkeys([key for key, _ in (*arriving, *leaving)], 0), **skips.pops}
        found.append(PartitionSkips(arriving, leaving, pops))
    return tuple(found)


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
