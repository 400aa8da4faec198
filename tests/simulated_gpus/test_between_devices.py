"""Several devices: copies between them, and autograd's backward over them."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

Kinds = Callable[[], list[str]]


def test_a_copy_is_ordered_for_the_current_streams_of_both_devices(kinds: Kinds) -> None:
    x = torch.ones(4, device="cuda:0").add_(1)
    y = x.to("cuda:1", non_blocking=True)
    x.zero_()
    assert y.add_(1).tolist() == [3, 3, 3, 3]
    assert kinds() == []


def test_a_copy_waits_for_the_target_s_stream_to_finish_with_the_memory(kinds: Kinds) -> None:
    x, y = torch.ones(4, device="cuda:0"), torch.zeros(4, device="cuda:1")
    y.add_(1)
    y.copy_(x, non_blocking=True)
    assert kinds() == []


def test_a_copy_waits_for_no_other_stream_of_the_target(kinds: Kinds) -> None:
    x, side = torch.ones(4, device="cuda:0"), torch.cuda.Stream("cuda:1")
    y = x.to("cuda:1", non_blocking=True)
    with torch.cuda.stream(side):
        y.sum()
    assert "RACE" in kinds()


def test_a_copy_runs_on_the_current_stream_of_the_source(kinds: Kinds) -> None:
    x, side = torch.ones(4, device="cuda:0"), torch.cuda.Stream("cuda:0")
    side.wait_stream(torch.cuda.current_stream("cuda:0"))
    with torch.cuda.stream(side):
        y = x.to("cuda:1", non_blocking=True)
        y.sum()
    x.add_(1)
    assert kinds() == ["RACE"]


def test_tensors_of_two_devices_do_not_mix(kinds: Kinds) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        torch.ones(4, device="cuda:0") + torch.ones(4, device="cuda:1")
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        torch.ones(4, device="cuda:0") + torch.ones(4)
    assert (torch.ones(4, device="cuda:0") + torch.tensor(1.0)).tolist() == [2, 2, 2, 2]


def test_a_backward_over_two_devices_and_side_streams_needs_no_wait_of_the_user(
    kinds: Kinds,
) -> None:
    # "CUDA semantics", "Stream semantics of backward passes": each operation runs on the stream of
    # its forward, and autograd lets the consumer of a gradient wait for its producer.
    w = torch.ones(4, device="cuda:0", requires_grad=True)
    side = torch.cuda.Stream("cuda:0")
    side.wait_stream(torch.cuda.current_stream("cuda:0"))
    with torch.cuda.stream(side):
        h = w.exp()
    torch.cuda.current_stream("cuda:0").wait_stream(side)
    h.record_stream(torch.cuda.current_stream("cuda:0"))
    loss = (h * 2).to("cuda:1").pow(2).sum()
    loss.backward()
    assert w.grad is not None and w.grad.sum().isfinite()
    assert kinds() == []
