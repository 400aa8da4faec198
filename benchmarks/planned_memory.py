"""Plans Llamas of 7 and 70 billion parameters on GPUs that are not here: what fits where.

Nothing is computed, and no weights are loaded: models are built from their configurations on the
meta device, and operations are counted. *full* trains all weights with AdamW in bfloat16, *LoRA*
adapters of rank 16 on each linear layer of the blocks, *QLoRA* the same with frozen weights of half
a byte each, which a layer unpacks for its matrix product. A mini-batch has 32 rows of 2,048 tokens.
Where nothing fits, the table says how many such GPUs would do, if all is recomputed.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from time import perf_counter

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from pipert import plan_for
from pipert.planning.candidate import text_of

__all__ = ["main"]

SIZES = {
    "7B": LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000,
    ),
    "70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=32000,
    ),
}  # fmt: skip
WAYS = ("full", "LoRA", "QLoRA")
ROWS, TOKENS = 32, 2048


class Packed(nn.Module):
    """A frozen linear layer whose weights take half a byte each, and a scale for 64 of them."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        size = like.weight.numel()
        self.shape, self.dtype = like.weight.shape, like.weight.dtype
        self.register_buffer("packed", torch.empty(size // 2, dtype=torch.uint8, device="meta"))
        self.register_buffer("scales", torch.empty(size // 64, dtype=torch.uint8, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Unpacked.apply(x, self.packed, self.shape, self.dtype)  # type: ignore
        return y


class Unpacked(torch.autograd.Function):
    """A matrix product with weights that are unpacked again for its backward."""

    @staticmethod
    def forward(ctx, x, packed, shape, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(packed)
        ctx.about = shape, dtype
        return nn.functional.linear(x, packed.new_empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (packed,), (shape, dtype) = ctx.saved_tensors, ctx.about
        return dy @ packed.new_empty(shape, dtype=dtype), None, None, None


def model_of(size: str, way: str) -> nn.Module:
    """Builds a model on the meta device."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(SIZES[size], dtype=torch.bfloat16)
        if way != "full":
            lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        if way == "QLoRA":
            for module in [*model.modules()]:
                if isinstance(base := getattr(module, "base_layer", None), nn.Linear):
                    module.base_layer = Packed(base)
    return model


COLUMNS = (
    "model", "trained", "GPUs", "each", "weights", "gradients", "optimizer", "activations", "peak",
    "plan", "s to plan",
)  # fmt: skip


def row_of(size: str, way: str, gpus: int, memory: str) -> list[str]:
    """Plans one case; returns the memory of the GPU that is fullest."""
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    batch, begin = {"input_ids": ids, "labels": ids}, perf_counter()
    about = [size, way, str(gpus), memory]
    try:
        plan = plan_for(
            model_of(size, way), batch, devices=gpus, memory=memory, optimizer=torch.optim.AdamW
        )[0]
    except ValueError as error:
        enough = re.search(r"use (\d+) devices", str(error))
        if enough is None:
            raise
        return [*about, *"-----", f"{enough[1]} would do", f"{perf_counter() - begin:.0f}"]
    fullest = max(plan.memory, key=sum)
    modes = plan.checkpoint if isinstance(plan.checkpoint, str) else "mixed"
    sizes = map(text_of, (*fullest, sum(fullest)))
    how = f"{plan.schedule}, {plan.chunks} chunks, {modes}"
    return [*about, *sizes, how, f"{perf_counter() - begin:.0f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="eight GPUs of 80 GiB alone")
    options = parser.parse_args(arguments)
    cases = [*itertools.product(SIZES, WAYS, (2, 4, 8), ("24GiB", "80GiB"))]
    if options.short:
        cases = [case for case in cases if case[2:] == (8, "80GiB")]
    print(f"torch {torch.__version__}; planned, not measured: the fullest GPU\n")
    head: list[Sequence[str]] = [COLUMNS, ["-" * len(name) for name in COLUMNS]]
    for row in itertools.chain(head, itertools.starmap(row_of, cases)):
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
