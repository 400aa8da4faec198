"""``torch.cond`` and its like, with gradients, are refused where tasks run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert import Pipe, TransformError

pytestmark = [
    pytest.mark.slow,  # torch traces
    pytest.mark.filterwarnings("ignore"),  # torch's own, while it does
]

LOSS: dict[str, Any] = {"loss_fn": lambda y, _: y.sum(), "reduction": "sum"}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.cond(h.sum() > -1e9, torch.sin, torch.cos, (h,))  # type: ignore[no-any-return]


class Scan(Branch):
    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.scan import scan

        h = self.linear(x)
        y: Tensor = scan(lambda c, y: (c + y, c * y), h[:, 0] * 0, h.T)[1]
        return y.T


def pipe_of_two(kind: type[Branch], **options: Any) -> tuple[nn.Sequential, Pipe]:
    model = nn.Sequential(kind(), kind())
    return model, Pipe(model, [1, 1], devices=["cpu", "cpu"], **options)


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "call": lambda pipe, x: pipe(x),
    "step": lambda pipe, x: pipe.forward_backward(x, **LOSS),
    "map": lambda pipe, x: list(pipe.map([x, x])),
}


@pytest.mark.parametrize("run", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [Branch, Scan])
def test_they_are_refused_with_gradients_and_the_plain_module_works_afterwards(
    kind: type[Branch], checkpoint: str, run: Callable[[Any, Tensor], Any]
) -> None:
    model, pipe = pipe_of_two(kind, chunks=2, checkpoint=checkpoint)
    with pipe:
        with pytest.raises(TransformError, match=r"torch's (cond|scan) with gradients(.|\n)*F\["):
            run(pipe, torch.ones(4, 4))
        with torch.no_grad():
            torch.testing.assert_close(pipe(torch.ones(4, 4)), model(torch.ones(4, 4)))
    model(torch.ones(4, 4)).sum().backward()


def test_a_model_with_a_forward_of_its_own_is_refused_too() -> None:
    model = nn.Sequential(Branch(), Branch())
    with pipert.pipeline(model, ["1"], devices=["cpu", "cpu"], chunks=2) as pipe:
        with pytest.raises(TransformError, match="torch's cond with gradients"):
            pipe(torch.ones(4, 4))


@pytest.mark.parametrize("kind", [Branch, Scan])
@pytest.mark.parametrize("how", ["compiled", "one micro-batch"])
def test_the_remedies_are_right(kind: type[Branch], how: str) -> None:
    model, pipe = pipe_of_two(kind, checkpoint="never")
    x = torch.ones(4, 4)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    if how == "compiled":
        layers: Any = [torch.compile(layer, backend="aot_eager") for layer in model]
        pipe.close()
        pipe = Pipe(nn.Sequential(*layers), [1, 1], devices=["cpu", "cpu"], chunks=2)
    for is_step in (False, True):
        model.zero_grad()
        if is_step:
            pipe.forward_backward(x, **LOSS)
        else:
            pipe(x).sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    pipe.close()


def test_a_step_that_recomputes_its_only_micro_batch_is_refused() -> None:
    _, pipe = pipe_of_two(Branch, chunks=1, checkpoint="always")
    with pipe, pytest.raises(TransformError, match="torch's cond"):
        pipe.forward_backward(torch.ones(4, 4), **LOSS)
