"""Predicts each device's peak memory from its partition's needs when run alone.

Peak of device *j*::

    weights + .grad + what waits for its backward + the task at work
    + the caller's mini-batch, targets and outputs, where they are

*What waits* is one micro-batch less than are in flight: m with ``loss.backward()`` and ``gpipe``,
``min(m, n - j)`` with ``1f1b``. Of each it is what the graph has saved, or, if it is checkpointed,
the inputs of the partition.

*The task at work* is F, R or B, whichever needs most. R and F of a checkpointed micro-batch compute
on a copy of the inputs. B of a step has the gradients of all weights of the partition beside their
sums, and for a moment one more, the largest: torch returns them together.

What is *on its way* comes on top: outputs that the next device has not copied yet, and gradients.
In lockstep an output for partition k leaves k - j ticks after it was made, and its gradient comes
as long before it is needed. That is the difference between both bounds.

Bytes count until the host frees them. A GPU's allocator holds back what another stream has been
recorded to use until that is done with it: no simulated byte says how much that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.devices.alone import Alone

__all__ = ["Bounds", "Setting", "bounds", "for_each", "in_flight"]

NUMBERS = 16  # bytes: the loss of a micro-batch, and such


class Setting(NamedTuple):
    """How a mini-batch goes through."""

    way: str
    """``'backward'``, ``'gpipe'`` or ``'1f1b'``."""
    mode: str
    m: int
    batch: int
    """Bytes of the mini-batch, on the first device."""
    targets: int
    """Bytes, on the last."""
    outputs: int
    """Bytes of what the last partition returns for the mini-batch."""


class Bounds(NamedTuple):
    """Of the peak of one device, in bytes."""

    least: int
    most: int


def in_flight(setting: Setting, j: int, n: int) -> int:
    """How many micro-batches partition ``j`` has gone forward and not yet back with."""
    return min(setting.m, n - j) if setting.way == "1f1b" else setting.m


def for_each(setting: Setting, of: Alone, j: int, n: int, of_loss: int) -> Bounds:
    """What each further micro-batch costs device ``j`` at the peak; ``of_loss`` is what that saves.

    Exact for a step, but for numbers such as its loss. In ``loss.backward()`` gradients for all
    micro-batches may have come, and the caller's loss is as large as the mini-batch.
    """
    rows = setting.batch * (j == 0) + setting.targets * (j == n - 1)
    kept = 0 if setting.way == "1f1b" else of.saved if setting.mode == "never" else of.given
    if setting.way == "backward":
        kept += setting.outputs // setting.m * (j == n - 1)  # the caller has them, put together
    elif setting.way == "gpipe" and setting.mode != "never" and j == n - 1:
        kept += of_loss  # is not recomputed
    least = rows // setting.m + kept
    more = (of.sent + of_loss * (j == n - 1)) if setting.way == "backward" else 0
    return Bounds(least, least + more + NUMBERS)


def bounds(setting: Setting, parts: Sequence[Alone], j: int, of_loss: int) -> Bounds:
    """The peak of device ``j`` in lockstep."""
    n, of = len(parts), parts[j]
    is_last = j == n - 1
    always = of.weights + setting.batch * (j == 0) + setting.targets * is_last
    if is_last and setting.way == "backward":
        always += setting.outputs
    most = always + max(_tasks(setting, of, in_flight(setting, j, n), of_loss * is_last))
    # Where it ran alone, the gradients of its outputs stayed to the end, as did the graph of the
    # loss, which a step goes through before that of a recomputation.
    gone = of_loss if is_last and setting.way != "backward" and setting.mode != "never" else 0
    return Bounds(most - of.sent - gone, most + _on_the_way(setting, parts, j))


def _tasks(setting: Setting, of: Alone, alive: int, of_loss: int) -> Iterator[int]:
    """With each task that may need most, what is there but the weights."""
    is_step, plain = setting.way != "backward", setting.mode == "never"
    kept = of.saved if plain else of.given + of_loss * is_step
    # When the second B begins .grad is there, and with 1f1b another micro-batch has come.
    others = alive - 1 if setting.way == "1f1b" and setting.m > alive else max(alive - 2, 0)
    back = of.step if is_step else of.backward
    own = 0 if plain else of.given
    if setting.mode != "always":
        yield (alive - 1) * kept + of.forward
        yield (alive - 1) * kept + of.first
    if not plain:
        yield alive * of.given + of.quiet
    if setting.mode == "always":
        yield (alive - 1) * kept + own + max(of.forward, of.first)
    if setting.mode == "except_last" and setting.way == "1f1b" and alive > 1:
        # The last micro-batch has come, and is not the next to go back.
        yield (alive - 2) * kept + of.saved + of.weights + own + max(of.forward, back)
    if setting.m > 1:
        yield others * kept + of.weights + own + max(back, of.forward * (not plain))
    if is_step and setting.m > 1:  # the second gradient of a weight is added into a new tensor
        yield others * kept + 2 * of.weights + of.largest


def _on_the_way(setting: Setting, parts: Sequence[Alone], j: int) -> int:
    of, m = parts[j], setting.m
    here = of.given + of.sent  # in the hands of the worker, though the layers have read it
    going = of.unsaved if setting.mode == "never" else of.outputs
    waiting = sum(size * min(m, k - j) for k, size in going.items())
    if setting.way == "backward":
        # Gradients are copied as soon as they are there, and autograd's order is its own.
        return here + waiting + m * of.sent + setting.outputs * (j == len(parts) - 1)
    return here + waiting + sum(size * min(m, j - s) for s, size in of.inputs.items())
