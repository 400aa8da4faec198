"""Compares ``pipert.distributed.pipeline`` with torch's tracer, on models as libraries have them.

Each model is split over two processes, by ``torch.distributed.pipelining.pipeline`` under
``ScheduleGPipe``, and by ``pipert.distributed.pipeline``. Labels are left out and the loss is
computed behind the model, which is easier to trace. The table says whether the loss and the
gradients are the plain model's, to 1e-4; or how it ended.

    python over_ranks.py [--short] [MODEL ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint
from torch.distributed.pipelining import pipeline as traced

import pipert.distributed

__all__ = ["main"]

RANKS, CHUNKS, ROWS, SECONDS = 2, 4, 8, 120
SIZES: dict[str, Any] = dict(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, pad_token_id=0,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


class Unet(nn.Module):
    """Three levels with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Conv2d(c, 2 * c, 3, 2, 1) for c in (4, 8, 16)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(c, c // 4, 2, 2) for c in (64, 32, 16)])
        self.middle = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            skips.append(x := down(x).relu())
        x = self.middle(x)
        for up in self.ups:
            x = up(torch.cat([x, skips.pop()], 1)).relu()
        return x


def of_transformers(name: str, **config: Any) -> Callable[[], nn.Module]:
    """Returns what builds a tiny model of transformers from its configuration."""

    def build() -> nn.Module:
        library = import_module("transformers")
        kind = name.replace("ForConditionalGeneration", "").replace("ForCausalLM", "")
        kind = kind.replace("LMHeadModel", "").replace("ForSequenceClassification", "")
        settings = {**SIZES, **config, "attn_implementation": "sdpa"}
        model: nn.Module = getattr(library, name)(getattr(library, f"{kind}Config")(**settings))
        return model

    return build


def vit() -> nn.Module:
    """Returns a tiny vision transformer of timm."""
    library = import_module("timm.models.vision_transformer")
    model: nn.Module = library.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=4, num_heads=2, num_classes=3
    )
    return model


def words() -> dict[str, Tensor]:
    """Returns a batch of tokens."""
    return {"input_ids": torch.randint(1, 40, (ROWS, 8))}


def both() -> dict[str, Tensor]:
    """Returns a batch of tokens for an encoder and a decoder."""
    return {**words(), "decoder_input_ids": torch.randint(1, 40, (ROWS, 8))}


def images(channels: int) -> dict[str, Tensor]:
    """Returns a batch of images."""
    return {"x": torch.randn(ROWS, channels, 32, 32)}


GPT2 = dict(n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
T5 = dict(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0)
BERT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    "Llama": (of_transformers("LlamaForCausalLM"), words, "model.layers.2"),
    "Llama, tied": (
        of_transformers("LlamaForCausalLM", tie_word_embeddings=True), words, "model.layers.2",
    ),
    "GPT-2": (of_transformers("GPT2LMHeadModel", **GPT2), words, "transformer.h.2"),
    "BERT": (of_transformers("BertForSequenceClassification", **BERT), words,
             "bert.encoder.layer.2"),
    "T5": (of_transformers("T5ForConditionalGeneration", **T5), both, "decoder.block.0"),
    "Mixtral": (of_transformers("MixtralForCausalLM", num_local_experts=4), words,
                "model.layers.2"),
    "ViT of timm": (vit, lambda: images(3), "blocks.2"),
    "U-Net": (Unet, lambda: images(4), "middle"),
}  # fmt: skip


def loss_of(output: Any, _: Any) -> Tensor:
    """Returns a mean over the rows of the first tensor that the model returns."""
    first = output if isinstance(output, Tensor) else next(iter(dict(output).values()))
    loss: Tensor = first.square().mean()
    return loss


def loss_of_stage(output: Any, _: Any) -> Tensor:
    """Returns the same of what torch's last stage returns, which may be a tuple."""
    return loss_of(output[0] if isinstance(output, tuple) else output, None)


def by_torch(rank: int, model: nn.Module, batch: dict[str, Any], cut: str) -> Any:
    """Takes a step with torch's tracer and schedule; returns the loss and the gradients."""
    example = {name: value[: ROWS // CHUNKS] for name, value in batch.items()}
    split = {cut: SplitPoint.BEGINNING}
    stage = traced(model, (), example, split).build_stage(rank, torch.device("cpu"))
    schedule, losses = ScheduleGPipe(stage, CHUNKS, loss_of_stage), list[Tensor]()
    if rank == 0:
        schedule.step(**batch)
    else:
        schedule.step(target=torch.zeros(ROWS), losses=losses)
    loss = torch.stack(losses).mean().detach() if losses else None
    return loss, {name: p.grad for name, p in stage.submod.named_parameters()}


def by_pipert(rank: int, model: nn.Module, batch: dict[str, Any], cut: str) -> Any:
    """Takes a step with ``pipert.distributed.pipeline``; returns the same."""
    example = {name: value[: ROWS // CHUNKS] for name, value in batch.items()}
    pipe = pipert.distributed.pipeline(model, [cut], example=example, chunks=CHUNKS)
    loss = pipe.forward_backward(**batch, loss_fn=loss_of)
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model with the same values each time, and its batch."""
    torch.manual_seed(0)
    build, batch, _ = MODELS[name]
    return build(), batch()


def compared(rank: int, name: str, step: Any) -> str:
    """Takes a step; says how it differs from the plain model's."""
    plain, batch = made(name)
    parts = [{k: v[i : i + ROWS // CHUNKS] for k, v in batch.items()}
             for i in range(0, ROWS, ROWS // CHUNKS)]  # fmt: skip
    expected = torch.stack([loss_of(plain(**part), None) for part in parts]).mean()
    torch.autograd.backward(expected)
    grads = {key: p.grad for key, p in plain.named_parameters(remove_duplicate=False)}
    model, batch = made(name)
    loss, found = step(rank, model, batch, MODELS[name][2])
    if loss is not None and abs(loss - expected.detach()) > 1e-4:
        return "another loss"
    for key, grad in found.items():
        zeros = torch.zeros_like(plain.get_parameter(key))
        right, other = [zeros if one is None else one for one in (grads[key], grad)]
        if (right - other).abs().max() > 1e-4 * (1 + right.abs().max()):
            return f"another gradient: {key}"
    return "equal"


def process(rank: int, store: str, name: str, step: Any, sending: Connection) -> None:
    """Runs one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        sending.send(compared(rank, name, step))
    except BaseException as error:  # noqa: B036
        text = str(error.__cause__ or error).strip().split("\n")[0]
        sending.send(f"{type(error.__cause__ or error).__name__}: {text}"[:100])


def outcome(name: str, step: Any) -> str:
    """Starts the ranks; returns what the first one that is not equal says."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks, said = list[Any](), list[str]()
        for rank in range(RANKS):
            receiving, sending = context.Pipe(duplex=False)
            given = rank, str(Path(folder) / "store"), name, step, sending
            one = context.Process(target=process, args=given, daemon=True)
            one.start()
            ranks.append((one, receiving))
        for _, receiving in ranks:
            wait = 5 if any(text != "equal" for text in said) else SECONDS
            said.append(receiving.recv() if receiving.poll(wait) else "no answer")
        for one, _ in ranks:
            one.kill()
            one.join()
    return next((text for text in said if text not in ("equal", "no answer")), max(said))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a model of ours is not equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--short", action="store_true", help="the first and the last model")
    arguments = parser.parse_args(argv)
    names = arguments.models or (["Llama", "U-Net"] if arguments.short else list(MODELS))
    print(f"torch {torch.__version__}, two processes over gloo\n")
    print("| model | torch's tracer | `pipert.distributed.pipeline` |\n|---|---|---|")
    right = True
    for name in names:
        theirs, ours = outcome(name, by_torch), outcome(name, by_pipert)
        right &= ours == "equal"
        print(f"| {name} | {theirs} | {ours} |", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
