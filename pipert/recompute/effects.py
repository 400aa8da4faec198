"""Checks a recomputation by its effect: it must return what its forward returned.

There is no end of reasons why a layer does something else the second time: its mode, a codebook
that has moved, random numbers of its own. None of them is looked for. Instead:

1. ``F[i,j]`` keeps a sample of each differentiable output, up to 256 elements at even distances.
   That is one small operation on the device.
2. ``R[i,j]`` takes the same sample. Another number of outputs, another shape or dtype is refused at
   once.
3. All samples of a run are compared together when the step ends, before any gradient arrives; in a
   call, when the backward ends. Until then nothing waits for a device. A step then waits for the
   last ``R`` on each, and not for what comes behind, while gradients are being delivered.
4. Values may differ by as much as kernels do that are not deterministic (:data:`_TOLERANCES`), and
   one in 64 by more: an expert that is chosen by rounding is no other codebook.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert._torch import (
    WithoutDispatch,
    WithoutFunctions,
    backward_id,
    call_after_backward,
    is_wrapped,
)
from pipert.autograd.streams import CopyStreams
from pipert.errors import RecomputationError
from pipert.layers.place import Place
from pipert.schedules.action import RECOMPUTE, Action

_SIZE = 256  # the most elements of a sample
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-2}
"""The largest difference, relative to the element and to the mean of the sample together."""
_TOLERANCE = 5e-2  # for other dtypes
REMEDY = (
    "; layers must do the same when they run again: no counters, no random numbers from a "
    "generator of their own, no buffer or mode that has changed, no dependence on what the "
    "training loop changes, no parameter frozen or released in between. Otherwise exempt "
    "the layer with pipert.never_recompute, or use checkpoint='never'"
)


Sampled = tuple[torch.Size, torch.dtype, Tensor | None]
"""What is kept of an output: shape, dtype and values. ``None`` if there are none to be compared, as
in a tensor of another class."""


def sampled(ys: Sequence[Tensor]) -> list[Sampled]:
    """Sample tensors that require grad."""
    with WithoutFunctions(), WithoutDispatch():
        return [(y.shape, y.dtype, _sample(y)) for y in ys]


def _sample(tensor: Tensor) -> Tensor | None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_meta or is_wrapped(tensor):
        return None
    # Evenly, by an odd step: of a batch of sequences as many tokens as possible.
    numel = tensor.numel()
    step = numel // _SIZE | 1
    count = min(_SIZE, -(-numel // step))
    if tensor.is_contiguous() or tensor.element_size() == 1:
        return tensor.detach().contiguous().as_strided((count,), (step,)).clone()
    return tensor.detach().take(torch.arange(count, device=tensor.device) * step)


def _described(samples: list[Sampled]) -> str:
    each = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype, _ in samples]
    return f"({', '.join(each)})"


class _Pair(NamedTuple):
    """Two samples of one output. References no run, so that a failed one is in no cycle (R5)."""

    place: Place
    i: int
    layer: str
    before: Tensor
    after: Tensor

    def __str__(self) -> str:
        where = f", {self.layer}" if self.layer else ""
        return self.place.describe(Action(RECOMPUTE, self.i, self.place.j), where)


class Effects:
    """What the recomputations of a run returned, until that is compared. Thread-safe.

    Owned by the run, and in a call by its graph.

    Args:
        at_end: whether the run calls :meth:`check`. Otherwise the end of each backward does.
        streams: has the stream of each device to compare on.
    """

    __slots__ = ("_at_end", "_last", "_lock", "_pairs", "_streams")

    def __init__(self, at_end: bool, streams: CopyStreams) -> None:
        self._at_end = at_end
        self._streams = streams
        self._last: dict[torch.device, torch.cuda.Event] = {}  # behind the last recomputation
        self._lock = threading.Lock()  # of pairs: backward passes of a call may be concurrent
        self._pairs: list[_Pair] = []

    def compare(
        self, place: Place, i: int, layer: str, before: list[Sampled], after: list[Sampled]
    ) -> None:
        """Note the outputs of a forward and of its recomputation, of a ``layer`` or a partition.

        Raises:
            RecomputationError: they are no longer of the same shapes and dtypes. Other values are
                refused later.
        """
        both = list(zip(before, after, strict=False))
        if len(before) != len(after) or any([old[:2] != new[:2] for old, new in both]):
            raise RecomputationError(
                f"a recomputation returned {_described(after)} and its forward "
                f"{_described(before)}{REMEDY}"
            )
        pairs = [
            _Pair(place, i, layer, old, new)
            for (_, _, old), (_, _, new) in both
            if old is not None and new is not None and old.numel()
        ]
        with self._lock:
            self._pairs += pairs
        for device in {pair.before.device for pair in pairs if pair.before.is_cuda}:
            self._last[device] = torch.cuda.current_stream(device).record_event()
        if self._at_end:
            return
        if backward_id() < 0:  # the caller reads a saved tensor
            self.check()
        else:
            call_after_backward(self.check)

    def check(self) -> None:
        """Compare all that was noted, and forget it.

        Raises:
            RecomputationError: a recomputation returned other values than its forward.
        """
        with self._lock:
            pairs, self._pairs = self._pairs, []
        if not pairs:
            return  # another recomputation of this backward has come first
        groups = defaultdict[object, list[_Pair]](list)
        for pair in pairs:
            groups[pair.before.device, pair.before.dtype, pair.before.numel()].append(pair)
        with WithoutFunctions(), WithoutDispatch(), torch.inference_mode(), ExitStack() as stack:
            for device, event in self._last.items():
                stream: Any = self._streams.get(device, -1)
                # If memory runs out here, that of the samples is used again at once.
                stack.callback(torch.cuda.current_stream(device).wait_stream, stream)
                stack.enter_context(torch.cuda.stream(stream))
                stream.wait_event(event)
            flags = [(group, _differ(group)) for group in groups.values()]  # on all devices
            found = [
                pair
                for group, differ in flags
                for pair, differs in zip(group, differ.tolist(), strict=True)
                if differs
            ]
        if found:
            raise RecomputationError(
                "a recomputation returned other values than its forward, so gradients would be "
                f"wrong: {min(found, key=_order)}{REMEDY}"
            )


def _order(pair: _Pair) -> tuple[int, int]:
    return pair.i, pair.place.j


def _differ(pairs: Sequence[_Pair]) -> Tensor:
    """Return for each pair of samples whether they differ; all are of one dtype and size."""
    tolerance = _TOLERANCES.get(pairs[0].before.dtype.to_real(), _TOLERANCE)
    before, after = [
        _as_numbers(torch.stack([sample.reshape(-1) for sample in samples]))
        for samples in zip(*[pair[-2:] for pair in pairs], strict=True)
    ]
    size = before.abs().nan_to_num(0.0, 0.0, 0.0)
    # The mean of the sample, in which no outlier, such as a mask's, counts for all others.
    nonzero = (size > 0).sum(1, keepdim=True)
    median = size.sort(1).values.gather(1, (size.size(1) - 1 - nonzero // 2).clamp(min=0))
    mean = size.minimum(64 * median).mean(1, keepdim=True)
    least = 1e-3 if size.size(1) < 16 else 0.0  # a sum may be what its rounding leaves of zero
    near = (before - after).abs() <= tolerance * (size + mean + least)
    same = near | (before == after) | (before.isnan() & after.isnan())
    return (~same).sum(1) * 64 > same.size(1)


def _as_numbers(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    return values if values.dtype == torch.float64 else values.float()
