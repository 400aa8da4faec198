"""Compares calls of a model that is in a pipe with calls of the pipe, and ready micro-batches.

A Llama of transformers, built from a configuration, in two partitions on two CPU workers, or on
``--devices``, without recomputation; on GPUs it is larger. *Through the model* calls the model,
whose call goes through the pipe. *Ready* takes a step of eight micro-batches that are given one by
one, *by rows* one that splits a batch into eight. *Generate* continues eight rows by 16 tokens, in
the pipe and in the plain model, one micro-batch at a time in both.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from _measure import Row, report, rows, start, take_turns, verdict
from torch import Tensor
from torch.nn import functional

import pipert

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("This benchmark needs transformers: pip install '.[hf]'") from None

__all__ = ["main"]

ROWS, TOKENS, CHUNKS, VOCABULARY = 16, 64, 8, 256
BARS = {"through the model": 1.01, "ready": 1.02, "generate in the pipe": 1.05}
PAIRS = (
    ("through the model", "call of the pipe"),
    ("ready", "by rows"),
    ("generate in the pipe", "generate"),
)


def built(width: int, layers: int) -> Any:
    """Builds a Llama whose layers take some milliseconds each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=layers, num_attention_heads=width // 64, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def loss_of(output: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def products(model: Any, plain: Any, pipe: Any) -> dict[str, Callable[[], object]]:
    """Returns what is measured, by name."""
    ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), device=plain.device)
    prompt = ids[: ROWS // 2, :8]
    ready = [{"input_ids": part} for part in ids.chunk(CHUNKS)]

    def step(**arguments: Any) -> None:
        model.zero_grad()
        pipe.forward_backward(loss_fn=loss_of, **arguments)

    def generate(one: Any) -> None:
        one.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False, use_cache=True)

    return {
        "call of the pipe": lambda: pipe(input_ids=ids),
        "through the model": lambda: model(input_ids=ids),
        "by rows": lambda: step(input_ids=ids, target=ids),
        "ready": lambda: step(microbatches=ready, target=ids.chunk(CHUNKS)),
        "generate": partial(generate, plain),
        "generate in the pipe": partial(generate, model),
    }


def measured(devices: Sequence[str], repeats: int, slack: float) -> list[Row]:
    """Measures milliseconds of each product, and the ratios of those that belong together."""
    width, layers = (256, 4) if devices[0] == "cpu" else (2048, 16)
    model = built(width, layers)
    plain = copy.deepcopy(model).to(devices[0])
    cuts = [f"model.layers.{layers // 2}"]
    options: dict[str, Any] = {"devices": devices, "chunks": CHUNKS, "checkpoint": "never"}
    with pipert.pipeline(model, cuts, **options) as pipe:
        found = products(model, plain, pipe)

        def seconds(name: str) -> float:
            begin = _now(devices)
            found[name]()
            return _now(devices) - begin

        samples = take_turns(seconds, tuple(found), repeats=repeats)
    took = {name: 1e3 * median(times) for name, times in samples.items()}
    table = []
    for name, other in PAIRS:
        ratio, bar = took[name] / took[other], BARS[name] * slack
        missed = (f"{name}: {ratio:.3f} of {other}, the bar is {bar}",) if ratio > bar else ()
        cells = name, other, f"{took[name]:.1f}", f"{took[other]:.1f}", f"{ratio:.3f}", f"{bar:.2f}"
        table.append(Row(cells, missed))
    return table


def _now(devices: Sequence[str]) -> float:
    for device in set(devices) - {"cpu"}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__, devices="cpu,cpu")
    measure = partial(measured, arguments.devices, 15 if arguments.short else 51, arguments.slack)
    columns = "measured", "beside", "ms", "beside it, ms", "ratio", "bar"
    table = rows(measure, check=arguments.check)
    return verdict(report("A Llama in place", columns, table), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
