"""Does what a user does beside his steps: copies the model, fills containers, gives masks, draws.

Asides come after the steps of a case, and have the same results for a pipe and the plain module.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from pipert import Replicate, pipeline
from tests.any_model.drawing import Model as Drawing
from tests.any_model.drawing import outcomes
from tests.contract.ways import CALL, MODES, Way, same
from tests.fuzz.case import Case
from tests.fuzz.losses import labels
from tests.fuzz.users import Found, batches, keep

__all__ = ["take_asides"]


def take_asides(case: Case, module: nn.Sequential, found: Found, piped: bool) -> None:
    """Takes the asides of a case with its ``module``, which is in a pipe if it is ``piped``."""
    for name in case.asides:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            ASIDES[name](case, module, found, piped)


def copies(case: Case, module: nn.Sequential, found: Found, piped: bool) -> None:
    """Changes a copy of the model and trains it, on the CPU and without a pipe."""
    twin = copy.deepcopy(module).cpu().eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    args, kwargs = batches(case, None)[0].arguments(case, case.steps[0], slice(None))
    first, *others = twin
    y: Any = first(*args, **kwargs)
    for layer in others:
        y = layer(y)
    y = y["y"] if isinstance(y, dict) else y
    keep(found, "output of a copy", y)
    twin.zero_grad(set_to_none=True)
    if y.requires_grad:
        y.sum().backward()
    for k, parameter in enumerate(twin.parameters()):
        keep(found, f"gradient of parameter {k} of a copy", parameter.grad)


class Filling(nn.Module):
    """Fills the containers that its caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, seen: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        h = self.first(x)
        seen.append(h.detach())
        named["h"] = h.detach()
        y: Tensor = self.second(h)
        return y


def containers(case: Case, module: nn.Sequential, found: Found, piped: bool) -> None:
    """Reads what a forward has put into its caller's containers; with several chunks, none may."""
    model, x = Filling(), torch.randn(4, 3)
    seen: list[Tensor] = []
    named: dict[str, Tensor] = {}
    chunks = case.steps[0].chunks
    try:
        if piped:
            with pipeline(model, ["second"], devices=_two(case), chunks=chunks), torch.no_grad():
                y = model(x.to(_two(case)[0]), seen, named)
        elif chunks > 1:
            raise RuntimeError("several micro-batches would fill one container")
        else:
            y = model(x, seen, named).detach()
    except (RuntimeError, TypeError, ValueError):
        if chunks == 1:
            raise
        keep(found, "containers", "refused")
        return
    keep(found, "output with containers", y)
    keep(found, "containers", {"list": seen[0] if seen else None, "dict": named.get("h")})


class Masked(Filling):
    """Mixes the times of each row, or weighs them, by a mask of any name."""

    def forward(self, x: Tensor, split: bool, **named: Tensor) -> Tensor:  # type: ignore[override]
        h, (mask,) = self.first(x).tanh(), named.values()
        y: Tensor = self.second(h * mask[..., None] if split else mask @ h)
        return y


def masks(case: Case, module: nn.Sequential, found: Found, piped: bool) -> None:
    """Gives a mask of rows or one of times; what may be either is refused, naming Replicate."""
    if not piped:
        return
    dice, step = Random(case.seed), case.steps[0]
    how, rows = dice.choice(["split", "whole", "replicated"]), step.rows
    time, name = dice.choice([rows, 3, 5]), dice.choice(["mask", "src_mask", "attn_mask"])
    x = torch.randn(rows, time, 3)
    mask: Any = (torch.rand(rows if how == "split" else time, time) < 0.7).float()
    fits_both = how != "replicated" and len(mask) == rows > 1 and step.chunks > 1
    is_refused = fits_both and (time == rows or name == "attn_mask")
    plain = Masked()
    model = copy.deepcopy(plain)
    expected = plain(x, how == "split", **{name: mask})
    expected.sum().backward()
    options: Any = {"chunks": step.chunks, "checkpoint": step.checkpoint}
    given: dict[str, Any] = {name: Replicate(mask) if how == "replicated" else mask}
    with pipeline(model, ["second"], devices=_two(case), **options) as pipe:
        try:
            if dice.random() < 0.5:
                y = model(x, how == "split", **given)
                y.sum().backward()
            else:
                _, y = pipe.forward_backward(
                    x, how == "split", target=x, loss_fn=lambda y, _: y.sum(), reduction="sum",
                    return_outputs=True, **given,
                )  # fmt: skip
        except ValueError as error:
            if not (is_refused and "Replicate" in str(error)):
                raise
            return
    assert not is_refused
    same(y.cpu(), expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        same(one.grad.cpu(), other.grad)


def draws(case: Case, module: nn.Sequential, found: Found, piped: bool) -> None:
    """Trains a model whose own code draws: two runs from one seed must be equal."""
    if not piped:
        return
    dice = Random(case.seed)
    way = Way(dice.choice([CALL, "gpipe", "1f1b", "eager-1f1b", "zb-h1"]), dice.choice(MODES))
    devices = [case.devices[j % len(case.devices)] for j in range(3)]
    with warnings.catch_warnings():  # a layer, called in place of another, may skip a cut
        warnings.filterwarnings("ignore", "no partition begins at layer", UserWarning)
        runs = outcomes(Drawing(case.seed), way, devices)
    # Those of a tensor that several GPUs use are added up by autograd in no fixed order.
    rtol = 1e-5 if way.schedule == CALL else 0.0
    same(runs[1::2], runs[::2], rtol=rtol, atol=rtol)


def _two(case: Case) -> list[str]:
    return [case.devices[0], case.devices[-1]]


ASIDES: dict[str, Callable[[Case, nn.Sequential, Found, bool], None]] = {
    "copies": copies, "containers": containers, "labels": labels, "masks": masks, "draws": draws,
}  # fmt: skip
