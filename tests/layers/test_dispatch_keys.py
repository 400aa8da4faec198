"""Tests the private parts of torch that pipert needs; a failure means that torch changed them."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert.layers.cpu_draws import DRAWING, prepare
from pipert.layers.dispatch_keys import current_task, operations, set_current_task

ONE = torch.ones(())


@pytest.fixture(autouse=True)
def _prepared() -> None:
    prepare()


def test_a_key_is_included_for_a_block_in_one_thread() -> None:
    elsewhere: list[bool] = []
    with DRAWING.included():
        other = threading.Thread(target=lambda: elsewhere.append(DRAWING.is_included()))
        other.start()
        other.join()
        assert DRAWING.is_included()
    assert not DRAWING.is_included() and elsewhere == [False]


def test_operations_without_a_kernel_pass() -> None:
    x = torch.ones(3, requires_grad=True)
    with DRAWING.included():
        (gradient,) = torch.autograd.grad((x * 2).sum(), x)
    assert gradient.tolist() == [2.0] * 3


def test_higher_order_operators_pass() -> None:
    """An operator that is made later passes, too."""
    kind: Any = torch._ops.HigherOrderOperator
    made = type("Made", (kind,), {"__call__": lambda self, x: kind.__call__(self, x)})(
        f"pipert_test_{id(DRAWING)}"
    )
    made.py_impl(vars(torch._C)["DispatchKey"].AutogradCPU)(lambda x: x * 2)
    known: Any = torch.ops.higher_order.run_and_save_rng_state
    with DRAWING.included():
        assert made(ONE).item() == 2.0
        assert known(torch.ops.aten.neg.default, ONE)[1].item() == -1.0


def test_operations_outside_a_task_draw_as_usual() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3), torch.native_dropout(torch.ones(8), 0.5, True)[0]
    torch.manual_seed(0)
    with DRAWING.included():
        found = torch.rand(3), torch.native_dropout(torch.ones(8), 0.5, True)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_current_task_belongs_to_a_thread() -> None:
    elsewhere: list[Any] = []
    set_current_task("mine")
    other = threading.Thread(target=lambda: elsewhere.append(current_task()))
    other.start()
    other.join()
    assert current_task() == "mine" and elsewhere == [None]
    set_current_task(None)
    assert current_task() is None


def test_the_current_task_is_kept_until_it_is_replaced() -> None:
    class Value:
        pass

    one, other = Value(), Value()
    before = sys.getrefcount(one)
    set_current_task(one)
    assert sys.getrefcount(one) == before + 1
    set_current_task(other)
    assert sys.getrefcount(one) == before
    set_current_task(None)
    assert sys.getrefcount(other) == before


def test_a_backward_has_the_keys_and_the_task_of_its_caller() -> None:
    seen: list[Any] = []

    def look(gradient: Tensor) -> None:
        seen.append((current_task(), DRAWING.is_included()))

    x = torch.ones(3, requires_grad=True)
    x.register_hook(look)  # type: ignore[no-untyped-call]
    y = x.sum()
    set_current_task("mine")
    try:
        with DRAWING.included():
            torch.autograd.backward(y)
    finally:
        set_current_task(None)
    assert seen == [("mine", True)]


def test_all_operations_that_take_a_generator_are_found() -> None:
    found = {
        op.name()
        for op, schema in operations(lambda schema: "Generator? generator" in str(schema))
    }
    assert found >= {"aten::random_", "aten::binomial", "aten::_sample_dirichlet", "aten::uniform_"}
    has: Any = vars(torch._C)["_dispatch_has_kernel_for_dispatch_key"]
    assert all(has(name, "TESTING_ONLY_GenericMode") for name in found)


def test_all_that_draws_on_the_cpu_has_a_kernel_or_consists_of_others() -> None:
    has: Any = vars(torch._C)["_dispatch_has_kernel_for_dispatch_key"]
    left = {
        op.overloadpacket.__name__
        for op, _ in operations(lambda schema: True)
        if torch.Tag.nondeterministic_seeded in op.tags
        and not has(op.name(), "TESTING_ONLY_GenericMode")
        and has(op.name(), "CPU")
    }
    # They choose a way, or take no dropout.
    assert left == {"_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}
