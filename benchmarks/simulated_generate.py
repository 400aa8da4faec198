"""Compares ``generate`` of a model in a pipe with ``device_map`` in virtual time.

A Llama of transformers on two simulated GPUs, half of its layers on each: *device_map* is
accelerate's, *pipe* is pipert's. Both run; only the clocks of devices and links are simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _virtual import GPUS, Machine

# isort: split
import torch
from _measure import Row, report, start, verdict
from accelerate import dispatch_model
from transformers import LlamaConfig, LlamaForCausalLM

import pipert

__all__ = ["main"]

LAYERS, ROWS, PROMPT, TOKENS = 8, 8, 32, 16
BAR = 1.05
MACHINES = {
    "launches free": Machine(tflops=0.5, link_gbps=12.0),
    "launches of 5 us": Machine(tflops=0.5, link_gbps=12.0, host_us=5.0),
}


def built() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=4, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def spread() -> LlamaForCausalLM:
    """Spreads the model over two devices, as ``device_map`` does."""
    places = {f"model.layers.{k}": k // (LAYERS // 2) for k in range(LAYERS)}
    others = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    model: LlamaForCausalLM = dispatch_model(built(), {**others, **places})
    return model


def milliseconds(model: LlamaForCausalLM, machine: Machine) -> tuple[float, list[list[int]]]:
    """Returns the time of one ``generate``, and the tokens."""
    ids = torch.randint(1, 256, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    ids = ids.to("cuda:0")
    GPUS.rates(**machine.rates())
    GPUS.reset_time()
    found = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return 1e-3 * GPUS.makespan(), found.tolist()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if ``--check`` was given and the bar was missed."""
    arguments = start(argv, __doc__)
    mapped, model, table = spread(), built(), []
    with pipert.pipeline(model, [f"model.layers.{LAYERS // 2}"], devices=[0, 1], chunks=4):
        for name, machine in MACHINES.items():
            theirs, expected = milliseconds(mapped, machine)
            ours, found = milliseconds(model, machine)
            assert found == expected, "the tokens differ"
            ratio, bar = ours / theirs, BAR * arguments.slack
            text = f"{name}: {ratio:.3f} of device_map, the bar is {bar}"
            missed = (text,) if ratio > bar else ()
            cells = name, f"{ours:.3f}", f"{theirs:.3f}", f"{ratio:.3f}", f"{bar:.2f}"
            table.append(Row(cells, missed))
    columns = "simulated", "pipe, ms", "device_map, ms", "ratio", "bar"
    return verdict(report("generate, in virtual time", columns, table), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
