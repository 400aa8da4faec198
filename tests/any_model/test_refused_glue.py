"""What models do between their layers that a call does, and a step cannot follow: it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import How, assert_equal, results
from tests.any_model.test_glue import Exp, each_how

NAMES = ["base", "view", "view of the base"]


class ChangingViews(nn.Module):
    """Changes a tensor of an earlier partition, and uses it under another name, or when it is late.

    Args:
        changed: the name that it is changed by.
        used: the name that it is used by.
        later: whether in a later partition.
    """

    def __init__(self, changed: int, used: int, later: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.changed, self.used, self.later = changed, used, later

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) * 1
        names = [y, y[:, :2], y[:, 1:]]
        z = self.b(x)
        names[self.changed].mul_(z[:, :1])
        if self.later:
            z = self.c(z)
        last: Tensor = z + names[self.used].sum(1, keepdim=True)
        if not self.later:
            last = self.c(last)
        return last


@pytest.mark.pairwise
@each_how
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("used", range(3), ids=lambda k: f"used-{NAMES[k]}")
@pytest.mark.parametrize("changed", range(3), ids=lambda k: f"changed-{NAMES[k]}")
def test_a_change_under_another_name_is_right_in_a_call_and_refused_in_a_step(
    changed: int, used: int, later: bool, how: How
) -> None:
    model = ChangingViews(changed, used, later).double()
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    own = Family("views", lambda: Made(model, batch), ("b", "c"))
    if not how.schedule or changed == used == 0:
        assert_equal(*results(own.make(), own, how))
        return
    with pytest.raises(RuntimeError, match="changed in place in a later one, and used under"):
        results(own.make(), own, how)


class ChangingForAFunction(nn.Module):
    """Applies a function that no mode sees to what a later partition has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x) * 1
        z = self.b(x)
        y.mul_(z)
        return self.c(Exp.apply(y))  # type: ignore[no-untyped-call]


@each_how
def test_a_change_before_a_function_of_ones_own_is_right_in_a_call_and_refused_in_a_step(
    how: How,
) -> None:
    model = ChangingForAFunction().double()
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    own = Family("function", lambda: Made(model, batch), ("b", "c"))
    if not how.schedule:
        assert_equal(*results(own.make(), own, how))
        return
    with pytest.raises(RuntimeError, match="changed in place in a later one, and used in a custom"):
        results(own.make(), own, how)


class AskingForForces(nn.Module):
    """By a tensor of the first partition, in the second one.

    Args:
        directly: whether a part of the gradient does not go back through the first.
        unused: what ``allow_unused`` is.
    """

    def __init__(self, directly: bool, unused: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 20, nn.Linear(4, 4)) for _ in range(3)
        )
        self.directly, self.unused = directly, unused

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        y = self.b(self.a(x))
        energies = y.square() + x.square() if self.directly else y.square()
        (forces,) = torch.autograd.grad(
            energies.sum(), [x], create_graph=True, allow_unused=self.unused
        )
        return self.c(energies * forces)


@pytest.mark.pairwise
@each_how
@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
@pytest.mark.parametrize("directly", [False, True], ids=["", "directly"])
def test_gradients_by_what_is_earlier_are_right_in_a_call_and_refused_in_a_step(
    directly: bool, unused: bool, how: How
) -> None:
    model = AskingForForces(directly, unused).double()
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    own = Family("forces", lambda: Made(model, batch), ("b", "c"))
    if not how.schedule:
        assert_equal(*results(own.make(), own, how))
        return
    with pytest.raises(RuntimeError, match="goes back into an earlier partition"):
        results(own.make(), own, how)
