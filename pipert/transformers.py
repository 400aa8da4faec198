"""Trains a pipe with the ``Trainer`` of the library ``transformers`` (extra ``hf``).

Nothing else in pipert imports this module::

    pipe = pipert.pipeline(model, cuts=["model.layers.8"], chunks=8)
    trainer = PipeTrainer(pipe, TrainingArguments("out"), train_dataset=rows)
    trainer.train()

The trainer holds the model, ``pipe.module``, so everything around a step is as without a pipe:
optimizers and their groups, adapters, gradient accumulation, saving and resuming, metrics. A
training step calls ``pipe.forward_backward``, and an evaluation calls the pipe.

The loss is that of the plain ``Trainer``, however a batch is split. The model computes it from its
``labels``, for each micro-batch as the mean over the labels there, so each micro-batch is weighted
by its number of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise ImportError(
        "pipert.transformers needs the packages transformers and accelerate: "
        "pip install transformers accelerate"
    ) from error

from pipert.pipeline import ModulePipe

__all__ = ["PipeTrainer"]


class PipeTrainer(Trainer):  # type: ignore[misc,unused-ignore]
    """A ``Trainer`` that trains the model of a pipe, in the pipe.

    Args:
        model: the pipe.
        args: as in ``Trainer``. The whole pipe counts as one device in the batch size per device.
        schedule: the schedule of a training step, as in :meth:`pipert.Pipe.forward_backward`.
        **others: as in ``Trainer``. A ``compute_loss_func`` gets the outputs and labels of a
            micro-batch, and returns a sum divided by ``num_items_in_batch``.

    Raises:
        TypeError: ``model`` is not a pipe made by :func:`pipert.pipeline`.
        ValueError: ``args`` ask for something a pipe cannot do, such as several processes.
    """

    def __init__(
        self,
        model: ModulePipe,
        args: TrainingArguments | None = None,
        *,
        schedule: Any = "1f1b",
        **others: Any,
    ) -> None:
        if not isinstance(model, ModulePipe):
            raise TypeError(
                f"model must be a pipe, got {type(model).__qualname__}; make one with "
                "pipert.pipeline(model, ...)"
            )
        if args is None:
            args = TrainingArguments("tmp_trainer")  # as Trainer does
        _check(args)
        if args.n_gpu > 1:
            args._n_gpu = 1  # else Trainer would copy the model to all GPUs
        self.pipe = model
        self._schedule = schedule
        super().__init__(model.module, args, **others)
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is, on the devices of the pipe."""

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Run a batch forward and backward; return its loss."""
        self.pipe.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()  # schedule-free optimizers have a training mode
        inputs = self._prepare_inputs(inputs)
        arguments, labels = self._split(inputs)
        total = self._total(labels, num_items_in_batch)
        adds_up = self.compute_loss_func is not None and num_items_in_batch is not None
        with self.compute_loss_context_manager():
            loss: Tensor = self.pipe.forward_backward(
                **arguments,
                loss_fn=self._loss_fn(num_items_in_batch),
                target=labels,
                schedule=self._schedule,
                reduction="sum" if adds_up else "mean",
                denominator=total,
                loss_scale=self.accelerator.scaler,
            )
        return loss.to(self.args.device)

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a batch forward in the pipe."""
        self.pipe.eval()
        return super().prediction_step(self.pipe, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Call the pipe, and return the loss of the batch. Training steps do not call this."""
        arguments, labels = self._split(inputs)
        outputs = self.pipe(**arguments)
        if self.compute_loss_func is None:
            loss = self._mean(_loss_in(outputs), labels, inputs)
        else:
            moved = labels["labels"].to(self.pipe.devices[-1])
            loss = self.compute_loss_func(outputs, moved, num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _split(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's arguments, and the labels that weight or compute the loss."""
        labels = {name: inputs[name] for name in _LABELS if isinstance(inputs.get(name), Tensor)}
        if self.compute_loss_func is None:
            return dict(inputs), labels
        if "labels" not in labels:
            raise ValueError(
                "compute_loss_func needs a tensor 'labels', which is split like the batch, got "
                f"only {sorted(inputs)}; rename the one that holds them"
            )
        return {name: value for name, value in inputs.items() if name != "labels"}, labels

    def _total(self, labels: dict[str, Tensor], number: Tensor | int | None) -> Any:
        """Return what the sum of a batch's losses is divided by; ``None`` for a mean over rows.

        Args:
            labels: the batch's.
            number: the number of labels in all batches of the optimizer's step; ``None`` if each
                batch has the same weight.
        """
        if self.compute_loss_func is not None or not labels:
            return None
        if number is not None:
            return number
        return self._count(labels) * self.current_gradient_accumulation_steps

    def _loss_fn(self, number: Tensor | int | None) -> Callable[[Any, dict[str, Tensor]], Tensor]:
        """Return the loss function of a micro-batch; ``number`` as in :meth:`_total`."""
        steps = self.current_gradient_accumulation_steps

        def loss_fn(outputs: Any, labels: dict[str, Tensor]) -> Any:
            if self.compute_loss_func is not None:
                return self.compute_loss_func(outputs, labels["labels"], num_items_in_batch=number)
            loss = _loss_in(outputs)
            return _sum(loss, self._count(labels)) if labels else loss / steps

        return loss_fn

    def _count(self, labels: Mapping[str, Tensor]) -> Tensor:
        """Return the number of labels over which the model's loss is averaged."""
        if "shift_labels" in labels:
            found = labels["shift_labels"]
        else:
            found = labels["labels"]
            if self._loss_shifts_labels:
                found = found[..., 1:]
        return found.ne(_IGNORED).sum()

    def _mean(self, losses: Tensor, labels: dict[str, Any], inputs: dict[str, Any]) -> Tensor:
        """Return the loss of the batch, from the losses of its micro-batches."""
        m = len(losses)
        if labels:
            split = [value.tensor_split(m) for value in labels.values()]
            parts = [dict(zip(labels, part, strict=True)) for part in zip(*split, strict=True)]
            weights = torch.stack([self._count(part) for part in parts]).to(losses.device)
        else:
            rows = next(value for value in inputs.values() if isinstance(value, Tensor))
            sizes = [len(part) for part in rows.tensor_split(m)]
            weights = torch.tensor(sizes, device=losses.device)
        return _sum(losses, weights).sum() / weights.sum()


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


_LOMO = ("lomo", "adalomo")
_LABELS = ("labels", "shift_labels")
_REFUSED = {
    "label_smoothing_factor": "pass a compute_loss_func that smooths the labels",
    "torch_compile": "compile layers of the model",
    "fp16_full_eval": "make the pipe from a model in that precision",
    "bf16_full_eval": "make the pipe from a model in that precision",
    "deepspeed": "a pipe is one process",
    "fsdp": "a pipe is one process",
    "auto_find_batch_size": "choose per_device_train_batch_size yourself",
}
_IGNORED = -100  # among labels, in all of transformers


def _loss_in(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise ValueError(
            "the model has returned no loss; give rows with 'labels', or pass compute_loss_func"
        )
    return loss


def _sum(mean: Tensor, count: Tensor) -> Tensor:
    """Return the sum of ``count`` losses: zero where there are none and the mean is NaN."""
    return torch.where(count > 0, mean * count, torch.zeros_like(mean))
