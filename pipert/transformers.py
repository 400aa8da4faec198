"""Trains a model in a pipe with the ``Trainer`` of transformers, or one of trl (extra ``hf``).

Nothing else in pipert imports this module::

    class PipelinedTrainer(Pipelined, SFTTrainer):
        pass

    pipert.pipeline(model, cuts=["model.layers.8"])
    trainer = PipelinedTrainer(model, args=SFTConfig("out", gradient_accumulation_steps=8), ...)
    trainer.train()

A plain trainer works, too, since calls of the model go through its pipe: each of its batches goes
forward, then backward. With the mixin, the batches of one gradient accumulation are the
micro-batches of one step of the pipe, with the loss and the metrics of the trainer that it is mixed
into:

1. In a training step the trainer gets a one in place of the loss. What it makes of that, such as a
   division by the number of batches, and the gradient that comes back, scaled for float16, tell
   how it treats a loss.
2. With the last batch of an accumulation, the pipe takes a step whose function is the trainer's own
   ``compute_loss``. The gradients are there when the training step returns, as always.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise ImportError(
        "pipert.transformers needs the packages transformers and accelerate: "
        "pip install transformers accelerate"
    ) from error

from pipert.any_model.added_losses import LossCheck, LossesAddUp, takes_number
from pipert.any_model.routed import pipe_of
from pipert.batch.microbatch import scatter
from pipert.batch.tensors import tensors_of
from pipert.pipes.module_pipe import ModulePipe

__all__ = ["Pipelined"]

_log = logging.getLogger("pipert")

_Base: Any = Trainer if TYPE_CHECKING else object


class Pipelined(_Base):  # type: ignore[misc,unused-ignore]
    """A mixin for a ``Trainer``, whose training steps run in the pipe of its model.

    A batch is split further, by its rows, if the pipe has ``chunks`` and the loss is a sum that is
    divided by the number of items in all batches, such as that of a causal language model or of a
    ``compute_loss_func``; the first steps compare. The loss of any other model is whatever it is
    for the whole batch.
    ``gradient_checkpointing=True`` sets the pipe's ``checkpoint`` to ``'always'``.

    Args:
        *args: as of the trainer. Its model is in a pipe, see :func:`pipert.pipeline`.
        **kwargs: likewise.

    Raises:
        TypeError: the model is not in a pipe.
        ValueError: the arguments ask for something a pipe cannot do, such as several processes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, TrainingArguments)]
        names = "gradient_checkpointing", "activation_checkpointing"  # the older one, and the newer
        recomputes = any(getattr(one, name, False) for one in given for name in names)
        for one in given:
            _check(one)
            for name in names:  # the model's own would recompute what the pipe does
                setattr(one, name, False)
        self._pipe_kept: list[tuple[Any, Any, Tensor]] = []
        self._pipe_losses = LossesAddUp()
        super().__init__(*args, **kwargs)
        self._check_pipe()
        if recomputes:
            self.pipe.checkpoint = "always"
            _log.info("gradient_checkpointing=True: the pipe recomputes, with checkpoint='always'")

    @property
    def pipe(self) -> ModulePipe:
        """The pipe of the model."""
        found: Any = pipe_of(self.model)
        if found is None:
            raise TypeError(
                f"the model, a {type(self.model).__qualname__}, is not in a pipe; make one first: "
                "pipert.pipeline(model, cuts)"
            )
        pipe: ModulePipe = found
        return pipe

    def _check_pipe(self) -> None:
        pipe = self.pipe
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # all partitions are on one GPU; else Trainer would copy the model
        is_its_own_reference = getattr(self, "ref_model", self) is None
        is_its_own_reference &= hasattr(self.model, "peft_config")
        if is_its_own_reference and not getattr(self.args, "precompute_ref_log_probs", True):
            raise ValueError(
                "the reference of this trainer is its own model without adapters, which a step of "
                f"the pipe cannot switch off for one micro-batch of {pipe!r}; set "
                "precompute_ref_log_probs=True, or use the trainer without Pipelined"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the trainer."""
        self._pipe_kept = []  # of an accumulation that was broken off
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keep a batch; with the last one of an accumulation, take the step. Return its loss."""
        ones: list[Tensor] = []

        def keep(
            model: nn.Module, inputs: Any, return_outputs: bool = False,
            num_items_in_batch: Tensor | int | None = None,
        ) -> Tensor:  # fmt: skip
            ones.append(torch.ones((), device=self.args.device, requires_grad=True))
            self._pipe_kept.append((inputs, num_items_in_batch, ones[0]))
            return ones[0]

        own = vars(self).get("compute_loss")
        self.compute_loss = keep  # whichever class it is that overrides it
        try:
            factor = super().training_step(model, inputs, num_items_in_batch)
        except BaseException:
            self._pipe_kept = []
            raise
        finally:
            del self.compute_loss
            if own is not None:
                self.compute_loss = own
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(factor)
        return self._take_pipe_step(model, factor)

    def _take_pipe_step(self, model: nn.Module, factor: Tensor) -> Tensor:
        """Run what was kept forward and backward; losses count by ``factor``."""
        kept, self._pipe_kept = self._pipe_kept, []
        parts = [self._pipe_parts(inputs, number) for inputs, number, _ in kept]
        microbatches = [(k, part) for k, each in enumerate(parts) for part in each]
        gradient = kept[-1][2].grad
        assert gradient is not None
        is_due = len(microbatches) > len(kept) and self.compute_loss.__module__ != _SFT
        is_due = is_due and self._pipe_losses.is_due(None)
        check = LossCheck(self.model, kept[0][1], False, None, is_due)

        def step(microbatch: tuple[int, Any]) -> Tensor:
            k, inputs = microbatch
            loss = self._pipe_loss(model, inputs, kept[k][1], check)
            return loss * factor.to(loss.device)

        run = partial(
            self.pipe.forward_backward, microbatches=microbatches, step=step, reduction="sum",
            loss_scale=gradient / factor,
        )  # fmt: skip
        with self.compute_loss_context_manager():
            total = self._pipe_losses.take(check, run)
        if total is None:  # from now on each batch is one micro-batch
            self._pipe_kept = kept
            return self._take_pipe_step(model, factor)
        return total.to(factor.device)  # type: ignore[no-any-return]

    def _pipe_loss(self, model: nn.Module, inputs: Any, number: Any, check: LossCheck) -> Tensor:
        """Compute the loss of a part of a batch; in a check, whether it adds up."""
        if not check.looks_now():
            loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=number)
            return loss
        arguments = dict(inputs)
        loss, output = self.compute_loss(model, inputs, True, num_items_in_batch=number)
        if self.compute_loss_func is None:
            check.look(output, arguments, loss)
        else:
            labels = arguments.get("labels")
            check.compare(loss, lambda n: self.compute_loss_func(output, labels, n))
        return loss

    def _pipe_parts(self, inputs: Any, number: Tensor | int | None) -> Sequence[Any]:
        """Split a batch by its rows if its loss may be a sum that is divided by ``number``."""
        kind = self.compute_loss.__module__
        if kind == _SFT:  # it adds up the probabilities of labels; those of experts do not add up
            may_add_up = not getattr(self, "aux_loss_enabled", False)
        else:
            may_add_up = self.compute_loss_func is not None or takes_number(self.model)
            may_add_up &= self._pipe_losses.may_add_up(None) and kind == "transformers.trainer"
        if number is None or not may_add_up or not isinstance(inputs, Mapping):
            return [inputs]
        rows = {len(tensor) for tensor in tensors_of(inputs)[0] if tensor.dim()}
        if len(rows) != 1:
            return [inputs]
        return [part.kwargs for part in scatter((), dict(inputs), self.pipe.chunks)]


def _check(args: TrainingArguments) -> None:
    for name, remedy in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"{name} must not be set for a pipe, got {value!r}; {remedy}")
    if args.optim in _LOMO:
        raise ValueError(
            f"optim={args.optim.value!r} takes its steps during the backward of Trainer, which a "
            "pipe replaces; choose another one"
        )
    if args.world_size > 1:
        raise ValueError(
            f"a pipe is trained by one process, got {args.world_size}; start one, or write the "
            "loop with DistributedDataParallel"
        )


_SFT = "trl.trainer.sft_trainer"
_LOMO = ("lomo", "adalomo")
_REFUSED = {
    "torch_compile": "compile layers of the model",
    "deepspeed": "a pipe is one process",
    "fsdp": "a pipe is one process",
    "auto_find_batch_size": "choose per_device_train_batch_size yourself",
}
