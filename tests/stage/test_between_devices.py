"""Tests stages on two devices in a call: which values are copied, and which stream waits for which.

The second device is ``meta``, which tensors really are copied to, with streams that only note what
they are told.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.layers import Apply
from tests.stages import CPU, META, Driven, FakeStreams, run_between_devices


def test_a_forward_copies_after_compute_and_computes_after_the_copy(fake: FakeStreams) -> None:
    run_between_devices(fake)
    assert fake.log == [
        "F[0,0]",
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,1]",
    ]


def test_a_forward_without_grad_copies_and_waits_in_the_same_order(fake: FakeStreams) -> None:
    with torch.no_grad():
        run_between_devices(fake)
    assert fake.log == [
        "F[0,0]",
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,1]",
    ]


def test_a_backward_goes_the_same_way_back(fake: FakeStreams) -> None:
    y = run_between_devices(fake)
    fake.log.clear()
    torch.autograd.backward(y.sum())
    assert fake.log == [
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        "<copy meta 0> waits for <compute meta>",  # for memory that nobody else adds to
        "copy from <copy meta 0> to <copy cpu 0>",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
    ]


def test_a_recomputation_runs_while_the_gradient_is_still_being_copied(fake: FakeStreams) -> None:
    y = run_between_devices(fake, recomputed=1)
    fake.log.clear()
    torch.autograd.backward(y.sum())
    assert fake.log == [
        "R[0,1]",
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        "<copy meta 0> waits for <compute meta>",  # for memory that nobody else adds to
        "copy from <copy meta 0> to <copy cpu 0>",
        "R[0,0]",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
    ]


def test_the_arguments_of_a_call_are_copied_after_what_computes_them(fake: FakeStreams) -> None:
    Driven([[fake.layer(0, META)]], [torch.ones(2)], [META], streams=fake).go()
    assert fake.log == [
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,0]",
    ]


def test_tensors_already_on_the_device_are_not_copied(fake: FakeStreams) -> None:
    x = torch.ones(2, device=META)
    run = Driven([[nn.Identity()], [nn.Identity()]], [x], [META, META], streams=fake)
    assert run.go()[0] is x and fake.log == []


def test_what_a_layer_keeps_elsewhere_on_purpose_stays_there(fake: FakeStreams) -> None:
    lengths = torch.ones(2, dtype=torch.long)
    keep = Apply(lambda x: (x, lengths))
    run = Driven([[keep], [nn.Identity()]], [torch.ones(2, device=META)], [META, CPU], streams=fake)
    ((x, kept),) = run.go()
    assert x.device == CPU and kept is lengths


def test_all_tensors_of_a_value_are_copied_at_once(fake: FakeStreams) -> None:
    value = {"a": torch.ones(2), "b": (torch.ones(3), "text")}
    run = Driven([[nn.Identity()], [nn.Identity()]], [value], [CPU, META], streams=fake)
    (y,) = run.go()
    assert (y["a"].device, y["b"][0].device, y["b"][1]) == (META, META, "text")
    assert fake.log.count("copy from <copy cpu 0> to <copy meta 0>") == 1


def test_each_micro_batch_is_copied_on_streams_of_its_own(fake: FakeStreams) -> None:
    inputs = [torch.ones(2), torch.ones(2)]
    Driven([[nn.Identity()], [nn.Identity()]], inputs, [CPU, META], streams=fake).go()
    assert [line for line in fake.log if line.startswith("copy from")] == [
        "copy from <copy cpu 0> to <copy meta 0>",
        "copy from <copy cpu 1> to <copy meta 1>",
    ]
