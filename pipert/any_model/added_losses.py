"""Decides by their effect whether the losses of a model's micro-batches add up to the plain loss.

A loss that is a sum divided by ``num_items_in_batch``, as that of causal models of transformers,
does, if each micro-batch gets the number of the whole mini-batch. Whether the loss of a call is one
cannot be read off a class: an adapter, a hook, or a ``forward`` of the instance may change it. So:

1. A model that has a ``loss_function`` of logits, labels and ``num_items_in_batch`` is tried.
2. In the first micro-batch that function is called once more, without gradients, with the logits
   of the output. It must return the loss of the output, and half of it for twice the number; or,
   if the number was counted from labels, the mean over those of this micro-batch. If it does not,
   the run ends there, and the mini-batch is one micro-batch.
3. That happens in calls 1, 2, 4, 8 ... and with other arguments, as reading it waits for a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipert._torch import has_hooks
from pipert._typing import Value
from pipert.batch.tensors import tensors_of
from pipert.recompute.public import current_microbatch
from pipert.recompute.snapshot import SMALL
from pipert.stage.loss import loss_in, own_loss
from pipert.stage.loss_checks import StepCall

T = TypeVar("T")
Again = Callable[[Any], Tensor]
"""Computes a loss once more, divided by a number; by that of its own labels for ``None``."""


class LossesAddUp:
    """What the calls of a model have shown of its loss."""

    def __init__(self) -> None:
        self._calls = 0
        self._is_clear: dict[Hashable, bool] = {}

    def check_of(self, model: Any, arguments: Mapping[str, Any]) -> LossCheck | None:
        """Return the check of a call; ``None`` if losses do not add up, or nobody knows."""
        labels, number = arguments.get("labels"), arguments.get("num_items_in_batch")
        if not isinstance(labels, Tensor) or not labels.dim():
            return None
        options = [(k, v) for k, v in arguments.items() if isinstance(v, bool)]
        own = vars(model).get("forward")
        code = getattr(own, "own", own), type(model).forward, getattr(model, "loss_function", None)
        kind = code, has_hooks(model), frozenset(arguments), frozenset(options)
        if kind not in self._is_clear and not takes_number(model):
            self._is_clear[kind] = False
        if not self.may_add_up(kind):
            return None
        is_counted = number is None
        number = _count(arguments, _shifts(model.loss_function)) if is_counted else number
        return LossCheck(model, number, is_counted, kind, self.is_due(kind))

    def is_due(self, kind: Hashable) -> bool:
        """Whether the losses of this call are to be checked."""
        self._calls += 1
        return kind not in self._is_clear or self._calls & (self._calls - 1) == 0

    def may_add_up(self, kind: Hashable) -> bool:
        """Whether no check has shown that losses of this kind do not add up."""
        return self._is_clear.get(kind, True)

    def take(self, check: LossCheck, run: Callable[[], T]) -> T | None:
        """Return what ``run`` returns; ``None``, as if it had not run, if the losses do not add up.

        That puts back the CPU's random state and small buffers. Large ones are seldom statistics,
        but may be the weights of a quantised model.
        """
        state = torch.get_rng_state() if check.is_due else None
        buffers = [x.data for x in (check.model.buffers() if check.is_due else ())]
        before = [(x, x.clone()) for x in buffers if x.numel() <= SMALL]
        try:
            found = run()
        except LossesDoNotAddUp:
            assert state is not None
            self._is_clear[check.kind] = False
            torch.set_rng_state(state)
            for buffer, old in before:  # all: batch norm changes them without a new version
                buffer.copy_(old)
            return None
        if check.is_clear:
            self._is_clear[check.kind] = True
        return found

    def take_step(
        self, model: Any, arguments: Mapping[str, Any], call: StepCall,
        take: Callable[[StepCall], Any],
    ) -> Any:  # fmt: skip
        """Take a step whose loss is the model's: in one micro-batch if nothing else is exact."""
        check = self.check_of(model, arguments)
        if check is None:
            return take(call)
        kwargs = {**call.kwargs, "num_items_in_batch": check.number}
        added = call._replace(kwargs=kwargs, reduction="sum")
        if check.is_due:
            taken = inspect.signature(model.loss_function).parameters
            target = {k: v for k, v in arguments.items() if k in taken}
            added = added._replace(target=target, loss_fn=check.own_loss)
        found = self.take(check, partial(take, added))
        if found is None:
            return take(call if check.is_counted else call._replace(chunks=1))
        return found


class LossesDoNotAddUp(Exception):
    """The losses of micro-batches do not add up, as the first one has shown."""


@dataclass(slots=True, eq=False)
class LossCheck:
    """Compares the loss of the first micro-batch with the model's ``loss_function``."""

    model: nn.Module
    number: Any
    """What divides the loss of the mini-batch."""
    is_counted: bool
    """Whether it was counted from the labels, rather than given."""
    kind: Hashable
    """What calls have in common whose losses are computed alike."""
    is_due: bool
    """Whether to look at all."""
    is_clear: bool = False
    """Whether a comparison has shown that losses add up; a loss of no labels shows nothing."""

    def looks_now(self) -> bool:
        """Whether to look at the current micro-batch."""
        return self.is_due and current_microbatch() == 0

    def around(self, call: Callable[..., Any], named: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, which calls the model, with a look at the first micro-batch."""

        def checked(*args: Any, **kwargs: Any) -> Any:
            y = call(*args, **kwargs)
            if self.looks_now():
                self.look(y, named(args, kwargs))
            return y

        return checked if self.is_due else call

    def own_loss(self, output: Value, target: Value) -> Tensor:
        """Return the model's own loss, with a look at the first micro-batch."""
        if self.looks_now():
            self.look(output, target)
        return own_loss(output, target)

    def look(
        self, output: Value, arguments: Mapping[str, Any], loss: Tensor | None = None
    ) -> None:
        """Compute the loss of a micro-batch once more, from the logits in its output.

        Raises:
            LossesDoNotAddUp: it is another one, or something else divides it.
        """
        loss = loss_in(output) if loss is None else loss
        logits, labels = _logits_in(output), arguments["labels"]
        numbers = [x for x in tensors_of(output)[0] if not x.dim()]
        if loss is None or logits is None or logits.dim() <= labels.dim() or len(numbers) > 1:
            raise LossesDoNotAddUp
        added = logits.size(labels.dim() - 1) - labels.size(-1)  # by prompts of peft
        labels = nn.functional.pad(labels, (max(added, 0), 0), value=-100)
        if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            raise LossesDoNotAddUp
        function: Any = self.model.loss_function
        taken = inspect.signature(function).parameters
        count = _count(arguments, _shifts(function)) if self.is_counted else None
        options = {k: v for k, v in arguments.items() if k in taken}
        options |= {"logits": logits.detach(), "labels": labels, "vocab_size": logits.size(-1)}
        self.compare(loss, lambda n: function(**{**options, "num_items_in_batch": n}), count)

    def compare(self, loss: Tensor, again: Again, count: Tensor | None = None) -> None:
        """Compare a loss with what it must be; ``count`` labels of it count, if that is known.

        Raises:
            LossesDoNotAddUp: it is another one, or something else divides it.
        """
        number = self.number
        if isinstance(number, Tensor):
            number = number.to(loss.device)
        with torch.no_grad():
            expected = again(number).double()
            if count is None:
                other = 2 * again(2 * number).double()
            elif not count:  # the loss of none is zero, unless none count in the whole mini-batch
                other = torch.zeros_like(expected) if number else expected
            else:
                other = again(None).double() * (count.to(loss.device) / number)
            rtol = 1e-5 if loss.dtype in (torch.float32, torch.float64) else 1e-2
            is_same = torch.isclose(loss.double(), expected, rtol, 1e-12, equal_nan=True)
            divides = torch.isclose(other, expected, 100 * rtol, 1e-12, equal_nan=True)
            if not (bool(is_same) and bool(divides)):
                raise LossesDoNotAddUp
            self.is_clear = bool(expected.isfinite() & (expected != 0))


def takes_number(model: Any) -> bool:
    """Whether a model can be given the number, and has a loss function to compare with."""
    loss = getattr(model, "loss_function", None)
    if not callable(loss):
        return False
    parameters = inspect.signature(loss).parameters
    needed = {k for k, p in parameters.items() if p.default is p.empty and p.kind != p.VAR_KEYWORD}
    if "num_items_in_batch" not in parameters or not needed <= {"logits", "labels", "vocab_size"}:
        return False
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    return all([_takes(inspect.signature(each.forward)) for each in (model, inner)])


def _takes(signature: inspect.Signature) -> bool:
    parameters = signature.parameters.values()
    return any([p.kind is p.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters])


def _shifts(loss_function: Any) -> bool:
    """Whether a loss function shifts labels, as that of a causal model does."""
    return "shift_labels" in inspect.signature(loss_function).parameters


def _count(arguments: Mapping[str, Any], shifts: bool) -> Tensor:
    """Return the number of labels that count."""
    labels, shifted = arguments["labels"], arguments.get("shift_labels")
    if shifts:
        labels = labels[..., 1:] if shifted is None else shifted
    count: Tensor = (labels != arguments.get("ignore_index", -100)).sum()
    return count


def _logits_in(output: Value) -> Tensor | None:
    found = output.get("logits") if isinstance(output, Mapping) else None
    if isinstance(output, tuple) and len(output) > 1:
        found = output[1]  # behind the loss
    return found if isinstance(found, Tensor) and found.dim() else None
