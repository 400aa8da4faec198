"""Finds where the package uses streams, events or current devices.

Each such place must have a mutant, or a reason not to have one, so that the table of mutants is
complete. Places are calls, found by the called name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutant import ROOT, Mutant, Span

__all__ = ["REASONS", "Site", "sites", "without_mutant"]

ANYWHERE = {
    "wait_stream", "wait_event", "record_stream", "record_event", "query",
    "current_stream", "default_stream", "set_stream", "set_device", "fork_rng",
    "compute_stream", "current_streams", "_set_streams",
    "_wait_for", "let_others_copy",
    "follow_the_caller", "return_what_was_read", "devices_with_own_streams",
    "_let_autograd_read",
}  # fmt: skip
"""Functions and methods that count as such a place, whatever they are called on."""

OF = {
    "streams": {"get", "wait", "copy"},
    "transfer": {"wait", "copy"},
    "transport": {"wait", "copy"},
    "_transport": {"wait", "copy"},
    "cuda": {"Stream", "Event", "ExternalStream", "synchronize", "stream", "device", "device_of"},
    "event": {"record", "wait", "synchronize"},
    "_streams": {"get"},
    "copies": {"stream"},
    "self": {"stream"},
}
"""Methods that count as such a place if called on a module or variable of the given name."""

REASONS = {
    (
        "pipert/stage/recorded.py",
        "streams.compute_stream(self._place.device)",
    ): "identifies a wait in a recording",
    ("pipert/stage/copies.py", "self.stream(i)"): "the waits on it have mutants",
    ("pipert/layers/effects.py", "self._streams.get(device, -1)"): "likewise",
    (
        "pipert/check/ways.py",
        "torch.cuda.synchronize(device)",
    ): "before the host's clock is read; only a real GPU would still be busy",
}
"""The places that need no mutant, with the reason."""

ONLY_TIMES = "pipert/observe/"
"""A directory on whose events only recorded times depend."""


class Site(NamedTuple):
    """A call in the source."""

    file: str
    line: int
    call: str
    """The whole call, as in ``stream.wait(waiter, awaited)``."""
    span: Span

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.call}"


def sites(root: Path = ROOT) -> list[Site]:
    """Returns all sites in the package."""
    found: list[Site] = []
    for path in sorted((root / "pipert").rglob("*.py")):
        file = str(path.relative_to(root))
        found += () if file.startswith(ONLY_TIMES) else _sites_in(path.read_text(), file)
    return found


def _sites_in(source: str, file: str) -> Iterator[Site]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_site(node.func):
            assert node.end_lineno is not None and node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Site(file, node.lineno, ast.unparse(node), (begin, end))


def _is_site(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in ANYWHERE
    if not isinstance(called, ast.Attribute):
        return False
    on = called.value
    name = on.id if isinstance(on, ast.Name) else on.attr if isinstance(on, ast.Attribute) else ""
    return called.attr in ANYWHERE or called.attr in OF.get(name, ())


def without_mutant(mutants: Iterable[Mutant], root: Path = ROOT) -> list[Site]:
    """Returns the sites that no mutant changes."""
    changed: dict[str, list[Span]] = {}
    for mutant in mutants:
        changed.setdefault(mutant.file, []).append(mutant.changed(root))
    return [
        site
        for site in sites(root)
        if not any(
            begin < site.span[1] and site.span[0] < max(end, begin + 1)
            for begin, end in changed.get(site.file, ())
        )
    ]
