"""Does what a user does beside his steps: copies the model, has containers filled, gives labels.

Asides come after the steps of a case, and have the same results for a pipe and the plain module.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipert import pipeline
from tests.fuzz.case import Case
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


def labels(case: Case, module: nn.Sequential, found: Found, piped: bool) -> None:
    """Gives labels to a language model, as everybody's loop does, and trains it by its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    ends = dict.fromkeys(["bos_token_id", "eos_token_id"], 0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=8,
            **settings, **ends,
        )  # fmt: skip
    ).double()
    step = case.steps[0]
    ids = torch.randint(11, (step.rows, 6))
    wanted = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
    wanted[0, -1] = 0  # at least one
    given: dict[str, Tensor] = {"input_ids": ids, "labels": wanted}
    if piped:
        with pipeline(
            model, ["transformer.h.1"], devices=_two(case), chunks=step.chunks,
            checkpoint=step.checkpoint,
        ):  # fmt: skip
            with warnings.catch_warnings():  # its loss is none that is known, so it is not split
                warnings.filterwarnings("ignore", ".*labels runs in one micro-batch", UserWarning)
                loss = model(**given).loss
            loss.backward()
    else:
        loss = model(**given).loss
        loss.backward()
    keep(found, "loss with labels", loss.detach())
    for name, parameter in model.named_parameters():
        keep(found, f"gradient of {name} with labels", parameter.grad)


def _two(case: Case) -> list[str]:
    return [case.devices[0], case.devices[-1]]


ASIDES: dict[str, Callable[[Case, nn.Sequential, Found, bool], None]] = {
    "copies": copies, "containers": containers, "labels": labels,
}  # fmt: skip
