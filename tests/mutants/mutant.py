"""Defines a mutant as data: a piece of one file, and its replacement."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Mutant", "Row", "Span"]

ROOT = Path(__file__).parents[2]

Span = tuple[int, int]
"""The begin and end of a piece of a file's text."""

Row = tuple[str, str, str, str, str]
"""The fields of a mutant, as the lists have them."""


class Mutant(NamedTuple):
    """One change to the package that tests must notice."""

    name: str
    """Short and unique."""
    file: str
    """The path from the root of the repository."""
    what: str
    """A description of the removed part."""
    text: str
    """The piece to replace, which occurs in the file exactly once."""
    instead: str

    def source(self, root: Path = ROOT) -> str:
        """Returns the text of the unchanged file."""
        return (root / self.file).read_text()

    def mutated(self, root: Path = ROOT) -> str:
        """Returns the text of the changed file.

        Raises:
            ValueError: the piece does not occur in the file exactly once.
        """
        source = self.source(root)
        if source.count(self.text) != 1:
            raise ValueError(
                f"mutant {self.name}: its text must occur in {self.file} once, and does so "
                f"{source.count(self.text)} times; give it what the file has now:\n{self.text}"
            )
        return source.replace(self.text, self.instead)

    def changed(self, root: Path = ROOT) -> Span:
        """Returns the span of the file that really differs, without common text at both ends."""
        begin = self.source(root).index(self.text)
        before = _common(self.text, self.instead)
        after = _common(self.text[before:][::-1], self.instead[before:][::-1])
        return begin + before, begin + len(self.text) - after


def _common(one: str, other: str) -> int:
    """Returns the length of the longest common prefix."""
    for k, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return k
    return min(len(one), len(other))
