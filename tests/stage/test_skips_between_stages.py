"""Tests that a call copies skips straight to the popping device, and their gradients back.

For streams see ``test_between_devices``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.stage.graphs import chain, inputs_of
from tests.stage.skips import NAMES, NamingStreams, Pop, Stash, popped_in, run_with_skip
from tests.stages import CPU, META, Driven, FakeStreams

both = pytest.mark.parametrize("recomputed", [0, 1])

THERE, BACK = "from <copy cpu 0> to <copy meta 0>", "from <copy meta 0> to <copy cpu 0>"


@both
def test_a_skip_is_copied_before_x_and_waited_for_with_it(
    naming: NamingStreams, recomputed: int
) -> None:
    run_with_skip(naming, [CPU, CPU, META], recomputed).go()
    assert naming.lines() == [
        "F[0,0]",
        "<copy cpu 0> waits for <compute cpu>",
        "F[0,1]",
        "<copy cpu 0> waits for <compute cpu>",
        f"copy {THERE}: skip",
        f"copy {THERE}: x",
        "<compute meta> waits for <copy meta 0>",
        "F[0,2]",
    ]


def test_a_skip_without_grad_is_copied_and_waited_for_in_the_same_order(
    naming: NamingStreams,
) -> None:
    with torch.no_grad():
        run_with_skip(naming, [CPU, CPU, META]).go()
    assert naming.lines()[3:] == [
        "<copy cpu 0> waits for <compute cpu>",
        f"copy {THERE}: skip",
        f"copy {THERE}: x",
        "<compute meta> waits for <copy meta 0>",
        "F[0,2]",
    ]


def test_a_skip_that_does_not_require_grad_is_copied_before_x_too(naming: NamingStreams) -> None:
    (y,) = run_with_skip(naming, [CPU, CPU, META], requires_grad=False).go()
    assert naming.copies() == [f"{THERE}: skip", f"{THERE}: x"]
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.copies() == [f"{BACK}: x"]


# Where a skip goes from the first partition to the last: devices, copies there and back.
WAYS: list[tuple[list[torch.device], list[str], list[str]]] = [
    ([CPU, CPU, CPU], [], []),
    ([CPU, META], [f"{THERE}: skip", f"{THERE}: x"], [f"{BACK}: x", f"{BACK}: skip"]),
    ([CPU, META, CPU], [f"{THERE}: x", f"{BACK}: x"], [f"{THERE}: x", f"{BACK}: x"]),
    (
        [CPU, META, META],
        [f"{THERE}: x", f"{THERE}: skip"],
        [f"{BACK}: skip", f"{BACK}: x"],
    ),
    (
        [CPU, META, META, CPU, META],
        [f"{THERE}: x", f"{BACK}: x", f"{THERE}: skip", f"{THERE}: x"],
        [f"{BACK}: x", f"{BACK}: skip", f"{THERE}: x", f"{BACK}: x"],
    ),
]


@both
@pytest.mark.parametrize(("devices", "there", "back"), WAYS, ids=lambda way: str(len(way)))
def test_a_skip_is_copied_once_and_its_gradient_once(
    naming: NamingStreams,
    devices: list[torch.device],
    there: list[str],
    back: list[str],
    recomputed: int,
) -> None:
    (y,) = run_with_skip(naming, devices, recomputed).go()
    forward = naming.copies()
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert (forward, naming.copies()) == (there, back)


def test_the_gradient_of_a_skip_goes_straight_back(naming: NamingStreams) -> None:
    """It arrives while B[0,1] runs; B[0,0] waits for both gradients."""
    (y,) = run_with_skip(naming, [CPU, META, META]).go()
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.lines() == [
        "B[0,2]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: skip",
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: x",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
        "<compute meta> waits for <copy meta 0>",  # at the end, in the caller
    ]


def test_the_partition_that_stashed_recomputes_while_the_gradients_are_being_copied(
    naming: NamingStreams,
) -> None:
    (y,) = run_with_skip(naming, [CPU, META, META], recomputed=1).go()
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.lines() == [
        "R[0,2]",
        "B[0,2]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: skip",
        "R[0,1]",
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: x",
        "R[0,0]",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
        "<compute meta> waits for <copy meta 0>",  # at the end, in the caller
    ]


@both
def test_a_skip_for_several_partitions_is_copied_to_each(
    naming: NamingStreams, recomputed: int
) -> None:
    (y,) = run_with_skip(naming, [CPU, META, CPU, META], recomputed, pops=[1, 2]).go()
    assert naming.copies().count(f"{THERE}: skip") == 2
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.copies().count(f"{BACK}: skip") == 2


class LogKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that logs additions and clones of tensors as long as a skip, on the compute stream."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("add", "clone") and NAMES[len(args[0])] == "skip":
            self.log.append(f"{name} on <compute {args[0].device}>")
        return func(*args, **kwargs or {})


@both
def test_gradients_of_a_skip_from_several_partitions_are_added_after_they_were_copied(
    naming: NamingStreams, recomputed: int
) -> None:
    """Autograd adds on the compute stream, and does not know the streams of the copies."""
    (y,) = run_with_skip(naming, [CPU, META, META], recomputed, pops=[1]).go()
    naming.log.clear()
    with LogKernels(naming.log):
        torch.autograd.backward(y.sum())
    added = naming.log.index("add on <compute cpu>")
    assert naming.log.index("<compute cpu> waits for <copy cpu 0>") < added


def test_skips_in_inference_mode_are_copied_without_other_operations(
    naming: NamingStreams,
) -> None:
    """The copy stream has waited for the layers only; a later clone would be read too early."""
    with torch.inference_mode(), LogKernels(naming.log):
        run_with_skip(naming, [CPU, META, META], pops=[1]).go()
    waited = naming.log.index("<copy cpu 0> waits for <compute cpu>")
    assert [line for line in naming.log[waited:] if line.endswith("on <compute cpu>")] == []


def test_each_micro_batch_s_skip_is_copied_on_streams_of_its_own(naming: NamingStreams) -> None:
    layers: list[list[nn.Module]] = [[Stash(nn.Identity())], [Pop(nn.Identity())]]
    Driven(layers, inputs_of(2), [CPU, META], streams=naming).go()
    assert [line for line in naming.copies() if line.endswith("skip")] == [
        f"from <copy cpu {i}> to <copy meta {i}>: skip" for i in range(2)
    ]


def test_the_gradient_of_a_skip_itself_is_waited_for_before_it_is_copied(
    fake: FakeStreams,
) -> None:
    (skip,) = popped_in(nn.Identity(), 1, devices=[CPU, META], streams=fake)
    assert chain(skip)[:3] == ["_Wait", "_Copy", "_Wait"]
