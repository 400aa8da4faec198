"""Saves states atomically: whenever the process or machine goes down, each is complete or absent.

A state is written to a temporary file in the same folder, flushed to disk, and renamed; then the
folder is flushed, so that the name persists. An interrupted write leaves only a temporary file,
which the next start deletes.

``torch.load`` detects a truncated file but not a wrong byte: it ignores the checksums that
``torch.save`` writes. So the name of a file contains the checksum of its bytes. A file that does
not match is renamed, which is logged as an error, and the previous state is used. If no state is
left, that is an error too; training never silently starts from scratch. A file that cannot be read
at all is an error at once, because it may be intact.
"""

from __future__ import annotations

import fcntl
import logging
import os
import zlib
from pathlib import Path
from typing import Any, Self

import torch
from service.log_lines import log_event

__all__ = ["CheckpointError", "Checkpoints"]

UNFINISHED = ".unfinished"
REFUSED = ".refused"
_PIECE = 1 << 20  # bytes read at once

_log = logging.getLogger("service.checkpoints")


class CheckpointError(RuntimeError):
    """States were saved but none is usable, or another process uses the folder."""


class Checkpoints:
    """The saved states in a folder, which one process at a time may use; a context manager.

    Args:
        folder: created if missing.
        keep: the number of states to keep; each save deletes older ones.

    Raises:
        CheckpointError: another process has the folder open.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._keep = folder, keep
        self._lock = (folder / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError as error:
            self._lock.close()
            raise CheckpointError(f"another process uses the folder {folder}") from error
        for unfinished in folder.glob("*" + UNFINISHED):
            unfinished.unlink()

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Writes ``state``; once this returns, the state survives a crash of the machine.

        Raises:
            OSError: it could not be written. Earlier states are intact.
        """
        unfinished = self._folder / f"step-{step:012}{UNFINISHED}"
        try:
            with unfinished.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            path = self._folder / f"step-{step:012}.{_checksum(unfinished)}.pt"
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self._flush_folder()
        for old in self.paths()[: -self._keep]:
            old.unlink()
        return path

    def load(self) -> dict[str, Any] | None:
        """Loads the newest intact state onto the CPU; ``None`` if none was ever saved.

        Raises:
            CheckpointError: there were states, but all were refused.
        """
        for path in reversed(self.paths()):
            if path.name.split(".")[1] == _checksum(path):
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                return state
            refused = path.with_name(path.name + REFUSED)
            os.replace(path, refused)
            self._flush_folder()
            log_event(_log, logging.ERROR, "checkpoint refused", path=str(refused))
        refused_paths = sorted(path.name for path in self._folder.glob("*" + REFUSED))
        if refused_paths:
            raise CheckpointError(
                f"no saved state in {self._folder} can be used, and {refused_paths} were refused; "
                "put a good one there, or delete them to begin from nothing"
            )
        return None

    def paths(self) -> list[Path]:
        """Returns the saved states, oldest first."""
        return sorted(self._folder.glob("step-*.*.pt"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lock.close()

    def _flush_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return f"{checksum:08x}"
