"""Reads a growing folder of text files, from a position that can be saved.

The known text is a prefix of each file. Only :meth:`Corpus.look` extends it, by new files and
appended text. The batches depend only on the seed and on what each look found, and
:meth:`Corpus.state_dict` holds both. So call ``look`` only just before saving the state, and save
before taking the next batch. A resumed run then gets the same batches, whatever text has arrived in
the meantime; its next look finds that text.

The order of the text:

* A file is cut into windows of ``context`` bytes; the byte after a window is its last target.
  A remainder at the end waits until it has grown to a whole window.
* A *part* is the text found by one look. Its windows come in random order, determined by the seed,
  the pass and the number of the part.
* A *pass* starts with all known text as one part and continues with the parts found during the
  pass, so it visits each window once.

Files may be added and appended to, in pieces of any size. A file that is gone, or has changed
within its known prefix, makes the saved state meaningless and is an error. Missing bytes are
noticed at once, changed bytes by a checksum in :meth:`Corpus.load_state_dict`.
"""

from __future__ import annotations

import random
import zlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Corpus", "CorpusChangedError"]

SUFFIXES = (".md", ".py", ".rst", ".txt")
_PIECE = 1 << 20  # bytes read at once


class CorpusChangedError(RuntimeError):
    """A file is gone, or text that was already read has changed."""


class Corpus:
    """Windows of the text files below ``folder``, in the order described above.

    Args:
        folder: searched recursively for files that end in one of ``SUFFIXES``. Names that begin
            with a dot are skipped, so a file can be written under such a name and then renamed.
        context: the number of bytes in a window.
        seed: determines the order.
    """

    def __init__(self, folder: Path, context: int, seed: int) -> None:
        self._folder, self._context, self._seed = folder, context, seed
        self._known: dict[str, list[int]] = {}  # per file: known bytes, and their checksum
        self._parts: list[list[list[Any]]] = []  # ranges: file, first byte, number of windows
        self._pass = self._part = self._index = 0
        self._order = torch.empty(0, dtype=torch.int64)
        self._ends: list[int] = []  # of the current part's ranges, counted in windows

    @property
    def windows(self) -> int:
        """The number of windows in a pass."""
        return sum(count for part in self._parts for _, _, count in part)

    @property
    def position(self) -> dict[str, int]:
        """The position of the next window."""
        return {"pass": self._pass, "part": self._part, "window": self._index}

    def look(self) -> int:
        """Finds new text; returns the number of bytes in its whole windows."""
        found: list[list[Any]] = []
        for file in sorted(self._folder.rglob("*")):
            name = file.relative_to(self._folder).as_posix()
            hidden = any(word.startswith(".") for word in name.split("/"))
            if hidden or file.suffix not in SUFFIXES or not file.is_file():
                continue
            length, checksum = self._known.get(name, (1, None))
            windows = (file.stat().st_size - length) // self._context
            if windows > 0:
                first = length - 1  # the last known byte was only a target; now it is input, too
                grown = length + windows * self._context
                if checksum is None:
                    length, checksum = 0, 0
                self._known[name] = [grown, self._checksum(name, length, grown, checksum)]
                found.append([name, first, windows])
        if found:
            self._parts.append(found)
            if len(self._parts) == 1:
                self._begin_part()
        return sum(int(count) for _, _, count in found) * self._context

    def next_batch(self, rows: int) -> Tensor:
        """Returns the next windows: ``[rows, context + 1]`` int64.

        Raises:
            CorpusChangedError: a file has become shorter, or is gone.
            ValueError: no text is known.
        """
        if not self._parts:
            raise ValueError(f"no text is known of {self._folder}; look first")
        text = b"".join(self._next_window() for _ in range(rows))
        batch = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return batch.view(rows, self._context + 1).long()

    def state_dict(self) -> dict[str, Any]:
        """Returns the known text and the position in it, as plain values."""
        return {
            "context": self._context,
            "seed": self._seed,
            "known": {name: list(known) for name, known in self._known.items()},
            "parts": [[list(found) for found in part] for part in self._parts],
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any], *, reread: bool = True) -> None:
        """Restores what :meth:`state_dict` returned.

        Args:
            state: the saved state.
            reread: whether to check that all known text is unchanged.

        Raises:
            CorpusChangedError: a file's bytes have changed.
            ValueError: the state has another ``context`` or ``seed``.
        """
        if (state["context"], state["seed"]) != (self._context, self._seed):
            raise ValueError(
                f"the place in the text was saved for context {state['context']} and seed "
                f"{state['seed']}, not {self._context} and {self._seed}"
            )
        for name, (length, checksum) in state["known"].items() if reread else ():
            if self._checksum(name, 0, length, 0) != checksum:
                raise self._changed(name, f"its first {length} bytes are others")
        self._known = {name: list(known) for name, known in state["known"].items()}
        self._parts = [[list(found) for found in part] for part in state["parts"]]
        position = state["position"]
        self._pass, self._part = position["pass"], position["part"]
        if self._parts:
            self._begin_part()
        self._index = position["window"]

    def _next_window(self) -> bytes:
        if self._index == len(self._order):
            self._part += 1
            if self._part == len(self._parts):
                self._pass, self._part = self._pass + 1, 0
                self._parts = [self._all_known()]
            self._begin_part()
        window = int(self._order[self._index])
        self._index += 1
        k = bisect_right(self._ends, window)
        name, first, _ = self._parts[self._part][k]
        before = self._ends[k - 1] if k else 0
        return self._read(name, first + (window - before) * self._context, self._context + 1)

    def _begin_part(self) -> None:
        self._ends = list(accumulate(count for _, _, count in self._parts[self._part]))
        # random hashes a string seed with SHA-512, so neighbouring numbers give unrelated seeds.
        seed = random.Random(f"{self._seed} {self._pass} {self._part}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(self._ends[-1], generator=generator)
        self._index = 0

    def _all_known(self) -> list[list[Any]]:
        return [
            [name, 0, (length - 1) // self._context]
            for name, (length, _) in sorted(self._known.items())
        ]

    def _checksum(self, name: str, begin: int, end: int, checksum: int) -> int:
        for place in range(begin, end, _PIECE):
            checksum = zlib.crc32(self._read(name, place, min(_PIECE, end - place)), checksum)
        return checksum

    def _read(self, name: str, place: int, count: int) -> bytes:
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(place)
                text = file.read(count)
        except FileNotFoundError as error:
            raise self._changed(name, "it is gone") from error
        if len(text) != count:
            raise self._changed(name, f"it ends before byte {place + count}")
        return text

    def _changed(self, name: str, how: str) -> CorpusChangedError:
        return CorpusChangedError(
            f"{self._folder / name} is not what it was: {how}. Files may be added and appended to; "
            "put it back, or begin again with another folder for the state"
        )

    def __repr__(self) -> str:
        return f"<Corpus of {len(self._known)} files below {self._folder}, {self.windows} windows>"
