"""A mutant as data: a piece of one file, and its replacement."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Mutant", "Span"]

ROOT = Path(__file__).parents[2]

Span = tuple[int, int]
"""Where something begins and ends in the text of a file."""


class Mutant(NamedTuple):
    """One change to the package that tests must notice."""

    name: str
    """Short and unique."""
    file: str
    """As seen from the root of the repository."""
    what: str
    """What is taken out, in words."""
    text: str
    """Occurs in the file exactly once."""
    instead: str
    tests: tuple[str, ...] = ()
    """The files of tests that are expected to notice it. Mutants of waits have no such list."""

    def source(self, root: Path = ROOT) -> str:
        """The file as it is."""
        return (root / self.file).read_text()

    def mutated(self, root: Path = ROOT) -> str:
        """The file as the mutant has it.

        Raises:
            ValueError: the text is not there, or there several times.
        """
        source = self.source(root)
        if source.count(self.text) != 1:
            raise ValueError(
                f"mutant {self.name}: its text must occur in {self.file} once, and does so "
                f"{source.count(self.text)} times; give it what the file has now:\n{self.text}"
            )
        return source.replace(self.text, self.instead)

    def changed(self, root: Path = ROOT) -> Span:
        """The part of the file that the mutant does away with; what is around it stays."""
        begin = self.source(root).index(self.text)
        before = _common(self.text, self.instead)
        after = _common(self.text[before:][::-1], self.instead[before:][::-1])
        return begin + before, begin + len(self.text) - after


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    for k, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return k
    return min(len(one), len(other))
