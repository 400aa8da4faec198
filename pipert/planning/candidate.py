"""Holds the ways to train a model that ``plan_for`` has found, and shows them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Candidate", "Candidates"]


@dataclass(frozen=True)
class Candidate:
    """One way to train the model, and what is predicted of its step."""

    balance: tuple[int, ...]
    devices: tuple[str, ...]
    chunks: int
    checkpoint: str | tuple[str, ...]
    schedule: str
    seconds: float
    """Of a step, without the optimizer."""
    peaks: tuple[int, ...]
    """The most bytes on each device, in the order of the devices."""

    @property
    def line(self) -> str:
        """The lines to paste."""
        checkpoint = self.checkpoint if isinstance(self.checkpoint, str) else [*self.checkpoint]
        return (
            f"pipe = Pipe(module, {[*self.balance]}, devices={[*self.devices]}, "
            f"chunks={self.chunks}, checkpoint={checkpoint!r})\n"
            f"pipe.forward_backward(..., schedule={self.schedule!r})"
        )


class Candidates(tuple[Candidate, ...]):
    """Ways that fit, the fastest first. ``print`` shows a table, and the lines to paste."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("ms a step", "chunks", "schedule", "balance", "checkpoint", "peak of each device")]
        for each in self:
            modes = each.checkpoint
            rows.append((
                f"{1e3 * each.seconds:.2f}", str(each.chunks), each.schedule,
                " ".join(map(str, each.balance)),
                modes if isinstance(modes, str) else " ".join(modes),
                ", ".join(map(text_of, each.peaks)),
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", self[0].line])


def text_of(size: int) -> str:
    """Return a number of bytes as a text such as ``'1.5 GiB'``."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 2 ** (10 * power):.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
