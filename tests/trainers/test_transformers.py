"""``Pipelined`` trains a model in a pipe as ``transformers.Trainer`` trains a plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipert

transformers = pytest.importorskip("transformers", reason="its Trainer is derived from")
pytest.importorskip("accelerate", reason="Trainer needs it")
peft = pytest.importorskip("peft", reason="adapters are tested as well")

from pipert.transformers import Pipelined  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
]

PADDING = 0
CUTS = ["model.layers.1"]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class PipelinedTrainer(Pipelined, transformers.Trainer):  # type: ignore
    pass


def build(kind: str = "LlamaForCausalLM") -> Any:
    """Builds the same tiny model each time, in double precision."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    config = model.config_class(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=PADDING,
        **({} if kind.startswith("Llama") else NO_DROPOUT),
    )
    return model(config).double()


def rows(count: int) -> list[dict[str, Any]]:
    """Padded; a row has from one label to twelve, and the second four have none."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for k in range(count):
        length = 2 + 3 * k % 11
        ids = torch.randint(1, 32, (12,), generator=generator)
        mask = torch.arange(12) < length
        labels = ids.masked_fill(~mask | torch.tensor(4 <= k < 6), -100)
        ids = ids.masked_fill(~mask, PADDING)
        made.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return made


def arguments(folder: Path, **more: Any) -> Any:
    defaults = {
        "per_device_train_batch_size": 6, "per_device_eval_batch_size": 5, "max_steps": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "seed": 3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **(defaults | more))


def pipe_of(model: nn.Module, cuts: list[str] = CUTS) -> Any:
    return pipert.pipeline(model, cuts, devices=["cpu", "cpu"], chunks=4)


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def both(
    folder: Path, make: Callable[[], Any] = build, cuts: list[str] = CUTS,
    kinds: tuple[Any, Any] = (PipelinedTrainer, transformers.Trainer),
    change: Callable[[Any], None] | None = None, **more: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Trains a pipe and the plain model; returns both trainers, which ``change`` may change."""
    func = more.pop("compute_loss_func", None)
    data = {"train_dataset": more.pop("train", rows(24)), "compute_loss_func": func}
    data |= {"eval_dataset": more.pop("eval", rows(7))}
    with pipe_of(make(), cuts) as pipe:
        models = pipe.module, make()
        piped, plain = trainers = [
            kind(model, arguments(folder, **more), **data)
            for kind, model in zip(kinds, models, strict=True)
        ]
        for trainer in trainers:
            if change is not None:
                change(trainer)
            trainer.train()
        if change is None:
            evaluated = [trainer.evaluate()["eval_loss"] for trainer in trainers]
            assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)
    return piped, plain


def assert_same(piped: Any, plain: Any) -> None:
    assert losses_of(piped) == pytest.approx(losses_of(plain), rel=1e-3)  # rounded in the log
    torch.testing.assert_close(
        piped.model.state_dict(), plain.model.state_dict(), check_device=False
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_and_parameters_are_those_of_the_plain_trainer(
    tmp_path: Path, accumulate: int
) -> None:
    """Rows have from none to many labels; the last accumulation of an epoch is a shorter one."""
    piped, plain = both(tmp_path, gradient_accumulation_steps=accumulate)
    assert len(losses_of(piped)) == 4
    assert_same(piped, plain)


def test_a_users_own_loss_function_gives_the_same_training(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    assert_same(*both(tmp_path, compute_loss_func=loss, gradient_accumulation_steps=2))


def mean_loss(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    logits, labels = model(inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class OwnMean(transformers.Trainer):  # type: ignore
    compute_loss = staticmethod(mean_loss)


class PipelinedMean(Pipelined, OwnMean):
    pass


FULL = [row for k, row in enumerate(rows(32)) if not 4 <= k < 6]  # each has labels


def test_a_mean_of_the_trainers_own_is_not_split(tmp_path: Path) -> None:
    more: dict[str, Any] = {"train": FULL, "gradient_accumulation_steps": 2}
    kinds = PipelinedMean, OwnMean
    assert_same(*both(tmp_path, kinds=kinds, change=lambda trainer: None, **more))


def test_a_mean_of_the_models_own_is_not_split(tmp_path: Path) -> None:
    def loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def make() -> Any:
        model = build()
        model.loss_function = loss
        return model

    assert_same(*both(tmp_path, make, train=FULL, gradient_accumulation_steps=2))


def test_a_loss_that_is_set_on_the_trainer_counts_in_each_step(tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        trainer.compute_loss = lambda *args, **kwargs: 10 * mean_loss(*args, **kwargs)

    assert_same(*both(tmp_path, change=change, train=FULL, gradient_accumulation_steps=2))


def test_batches_without_labels_that_count_change_no_step(tmp_path: Path) -> None:
    """BERT's loss of such a batch is not a number; its gradients are zero."""
    train = [{**row, "labels": row["labels"] * 0 - 100 if k < 6 else row["labels"]}
             for k, row in enumerate(FULL)]  # fmt: skip
    more: dict[str, Any] = {"train": train, "per_device_train_batch_size": 1, "max_steps": 5}
    make, cuts = (lambda: build("BertForMaskedLM")), ["bert.encoder.layer.1"]
    piped, plain = both(tmp_path, make, cuts, gradient_accumulation_steps=6, **more)
    assert all(loss == loss for loss in losses_of(piped))
    torch.testing.assert_close(
        piped.model.state_dict(), plain.model.state_dict(), check_device=False
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_a_mean_over_rows_is_the_same(tmp_path: Path, accumulate: int) -> None:
    def make() -> Any:
        model = build("BertForSequenceClassification")
        model.accepts_loss_kwargs = False  # as it says itself: it takes no num_items_in_batch
        return model

    train = [{**row, "labels": torch.tensor(k % 2)} for k, row in enumerate(rows(24))]
    cuts = ["bert.encoder.layer.1"]
    assert_same(
        *both(
            tmp_path, make, cuts, train=train, eval=train[:7],
            gradient_accumulation_steps=accumulate,
        )  # fmt: skip
    )


def test_a_scaler_of_the_accelerator_scales_the_gradients(tmp_path: Path) -> None:
    """The accelerator has one for half precision on GPUs."""
    batch = torch.utils.data.default_collate(rows(6))
    grads = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        with pipe_of(build()) as pipe:
            trainer = PipelinedTrainer(pipe.module, arguments(tmp_path))
            trainer.current_gradient_accumulation_steps = 1
            trainer.accelerator.scaler = scaler
            trainer.training_step(pipe.module, batch)
            grads.append([weight.grad for weight in pipe.parameters()])
    for scaled, grad in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(scaled, 8 * grad)


def test_a_subclass_context_around_the_loss_is_active_in_the_workers(tmp_path: Path) -> None:
    seen = []

    class Autocast(PipelinedTrainer):
        def compute_loss_context_manager(self) -> Any:
            return torch.autocast("cpu", torch.bfloat16)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return outputs.logits.float().square().sum() / num_items_in_batch

    with pipe_of(build().float()) as pipe:
        args = arguments(tmp_path, max_steps=1)
        Autocast(pipe.module, args, train_dataset=rows(6), compute_loss_func=loss).train()
    assert set(seen) == {True}


@pytest.mark.multi_gpu
def test_the_model_on_gpus_is_neither_moved_nor_copied(tmp_path: Path) -> None:
    """Trainer would move it to the first GPU, and then copy it to all."""
    plain = transformers.Trainer(build(), arguments(tmp_path), train_dataset=rows(24))
    plain.train()
    devices = ["cuda:0", "cuda:1"]
    with pipert.pipeline(build(), CUTS, devices=devices, chunks=4) as pipe:
        args = arguments(tmp_path, use_cpu=False, dataloader_pin_memory=False)
        piped = PipelinedTrainer(pipe.module, args, train_dataset=rows(24), eval_dataset=rows(7))
        assert args.train_batch_size == args.per_device_train_batch_size
        piped.train()
        piped.evaluate()
        assert {str(weight.device) for weight in pipe.parameters()} == set(devices)
    assert_same(piped, plain)


def test_adapters_are_saved_resumed_and_loaded_into_the_plain_model(tmp_path: Path) -> None:
    """Four steps in one go equal two, a new process's model, and two more."""

    def adapted() -> Any:
        return peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=r".*_proj"))

    def train(steps: int, resume: str | None) -> Any:
        with pipe_of(adapted(), ["base_model.model.model.layers.1"]) as pipe:
            args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
            trainer = PipelinedTrainer(pipe.module, args, train_dataset=rows(24))
            trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    at_once = train(4, None)
    train(2, None)
    resumed = train(4, str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(resumed.state_dict(), at_once.state_dict())
    saved = peft.PeftModel.from_pretrained(build(), tmp_path / "checkpoint-4")
    torch.testing.assert_close(saved.state_dict(), at_once.state_dict())
    assert any(name.endswith("lora_B.default.weight") and value.any()
               for name, value in saved.state_dict().items())  # fmt: skip


def test_the_whole_model_is_saved_and_resumed(tmp_path: Path) -> None:
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    piped, _ = both(tmp_path / "at once", **more)
    with pipe_of(build()) as pipe:
        args = arguments(tmp_path / "again", **more)
        again = PipelinedTrainer(pipe.module, args, train_dataset=rows(24))
        again.train(resume_from_checkpoint=str(tmp_path / "at once" / "checkpoint-2"))
    torch.testing.assert_close(again.model.state_dict(), piped.model.state_dict())


def test_a_model_that_is_no_pipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a LlamaForCausalLM, is not in a pipe; make one first"):
        PipelinedTrainer(build(), arguments(tmp_path))
