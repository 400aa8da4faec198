"""Predicts each device's peak memory from what its partition needs when run alone.

Peak of device *j*::

    weights + .grad + micro-batches that wait for their backward + the running task
    + the caller's mini-batch, targets and outputs, on the devices that hold them

*Waiting* are all micro-batches in flight but one. In flight are m with ``loss.backward()`` and
``gpipe``, ``min(m, n - j)`` with ``1f1b``. Each waiting micro-batch takes the memory of the tensors
that its graph has saved or, if it is checkpointed, of the partition's inputs.

*The running task* is F, R or B, whichever needs most. R and F of a checkpointed micro-batch compute
on a copy of the inputs. B of a step has the gradients of all weights of the partition beside their
sums, because torch returns them together. They are added in place, but for each weight's second
one: others may have the memory of the first, so there are three of one weight at that moment.

Samples of what checkpointed micro-batches returned, at most two kilobytes an output, may come on
top until the end.

Values *in transit* come on top: outputs that the next device has not copied yet, and gradients. In
lockstep an output for partition k leaves k - j ticks after it was made, and its gradient arrives
the same number of ticks before it is needed. This is the difference between the two bounds.

Bytes count until the host frees them. A GPU's allocator also holds back memory that another stream
was recorded to use, until that stream is done; the simulation does not count these bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.devices.alone import Alone

__all__ = ["Bounds", "Setting", "bounds", "for_each", "in_flight"]

NUMBERS = 16  # bytes of single numbers, such as the loss of a micro-batch


class Setting(NamedTuple):
    """How a mini-batch is run, and the bytes that the caller holds."""

    way: str
    """``'backward'``, ``'gpipe'`` or ``'1f1b'``."""
    mode: str
    m: int
    batch: int
    """Bytes of the mini-batch, on the first device."""
    targets: int
    """Bytes of the targets, on the last device."""
    outputs: int
    """Bytes of the last partition's outputs for the mini-batch."""


class Bounds(NamedTuple):
    """Bounds of a number of bytes."""

    least: int
    most: int


def in_flight(setting: Setting, j: int, n: int) -> int:
    """Returns how many micro-batches are between their forward and backward in partition ``j``."""
    return min(setting.m, n - j) if setting.way == "1f1b" else setting.m


def for_each(setting: Setting, part: Alone, j: int, n: int, of_loss: int) -> Bounds:
    """Predicts by how much each further micro-batch raises the peak of device ``j``.

    Exact for a step, except for single numbers such as its loss. In ``loss.backward()`` gradients
    of all micro-batches may have arrived, and the caller's loss is as large as the mini-batch.
    ``of_loss`` is the number of bytes that the graph of one micro-batch's loss saves.
    """
    rows = setting.batch * (j == 0) + setting.targets * (j == n - 1)
    kept = 0 if setting.way == "1f1b" else part.saved if setting.mode == "never" else part.given
    if setting.way == "backward":
        kept += setting.outputs // setting.m * (j == n - 1)  # the caller holds them, gathered
    elif setting.way == "gpipe" and setting.mode != "never" and j == n - 1:
        kept += of_loss  # the loss is not recomputed
    least = rows // setting.m + kept
    more = (part.sent + of_loss * (j == n - 1)) if setting.way == "backward" else 0
    samples = _samples(setting, part, j == n - 1)
    return Bounds(least, least + more + samples + NUMBERS)


def bounds(setting: Setting, parts: Sequence[Alone], j: int, of_loss: int) -> Bounds:
    """Predicts the peak of device ``j`` in lockstep."""
    n, part = len(parts), parts[j]
    is_last = j == n - 1
    always = part.weights + setting.batch * (j == 0) + setting.targets * is_last
    if is_last and setting.way == "backward":
        always += setting.outputs
    most = always + max(_tasks(setting, part, in_flight(setting, j, n), of_loss * is_last))
    # Where the partition ran alone, the gradients of its outputs stayed to the end. So did the
    # graph of the loss, which a step goes through before that of a recomputation.
    gone = of_loss if is_last and setting.way != "backward" and setting.mode != "never" else 0
    samples = setting.m * _samples(setting, part, is_last)
    return Bounds(most - part.sent - gone, most + _in_transit(setting, parts, j) + samples)


def _samples(setting: Setting, part: Alone, is_last: bool) -> int:
    if setting.mode == "never":
        return 0
    return 2 * 256 * 4 if is_last else part.samples  # there, the loss is part of the outputs


def _tasks(setting: Setting, part: Alone, alive: int, of_loss: int) -> Iterator[int]:
    """Yields, for each task that may need most, the bytes in use besides the weights."""
    is_step, plain = setting.way != "backward", setting.mode == "never"
    kept = part.saved if plain else part.given + of_loss * is_step
    # When the second B begins, .grad exists, and with 1f1b another micro-batch has come.
    others = alive - 1 if setting.way == "1f1b" and setting.m > alive else max(alive - 2, 0)
    back = part.step if is_step else part.backward
    copies = 0 if plain else part.given
    first, again = part.first, part.forward + copies
    if not is_step:  # a call keeps the inputs until the backward is over, a step until R is
        first, back = first + copies, back + copies
    if setting.mode != "always":
        yield (alive - 1) * kept + part.forward
        yield (alive - 1) * kept + part.first
    if not plain:
        yield alive * part.given + part.quiet
    if setting.mode == "always":
        yield (alive - 1) * kept + max(again, first)
    if setting.mode == "except_last" and setting.way == "1f1b" and alive > 1:
        # The last micro-batch has come, and is not the next to go back.
        yield (alive - 2) * kept + part.saved + part.weights + max(again, back)
    if setting.m > 1:
        yield others * kept + part.weights + max(back, again * (not plain))
    if is_step and setting.m > 1:  # the second gradients are there, beside the sums
        yield others * kept + 2 * part.weights + part.largest


def _in_transit(setting: Setting, parts: Sequence[Alone], j: int) -> int:
    part, m = parts[j], setting.m
    held = part.given + part.sent  # by the worker, although the layers have read it
    leaving = part.unsaved if setting.mode == "never" else part.outputs
    waiting = sum(size * min(m, k - j) for k, size in leaving.items())
    if setting.way == "backward":
        # Gradients are copied as soon as they exist, in an order that autograd chooses.
        return held + waiting + m * part.sent + setting.outputs * (j == len(parts) - 1)
    return held + waiting + sum(size * min(m, j - s) for s, size in part.inputs.items())
