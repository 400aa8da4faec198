"""Measures what the host pays for each layer of a Llama, and derives how many GPUs that can feed.

One interpreter launches the operations of all devices, so a device is idle when the host takes
longer for its tasks than it does. Here the layers are tiny, on two CPU workers: what is left is
Python and the launching of operations. CPU time of the process counts, the least of all repeats.
*plain* is the model itself, one micro-batch after the other; *reentrant* has torch's checkpoint
around each layer.

The second table divides the time of the kernels of a layer of a Llama of 7 billion parameters by
that of the host. Kernels are counted, not measured: bfloat16, at the rates that ``plan_for``
assumes for GPUs that are not here, 400 TFLOP/s and 2 TB/s, about what an H100 reaches. A GPU's own
launches and a faster or slower host are not in it.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _measure import Row, report, rows, start, take_turns, verdict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import pipert
from pipert.balance.counted import counted_seconds, counting

__all__ = ["main"]

LAYERS, M, TOKENS = 16, 4, 6
SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=256, pad_token_id=0,
)  # fmt: skip
LARGE = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=1, num_attention_heads=32,
    vocab_size=32,
)  # fmt: skip
BARS = {
    "never": {"no grad": 1.15, "call": 1.10, "1f1b": 1.20, "zb-h1": 1.45, "generate": 1.25},
    "always": {"call": 1.25, "1f1b": 1.30, "zb-h1": 1.50},
}
BESIDE = {"no grad": "plain no grad", "generate": "plain generate"}
Way = Callable[[], object]


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Computes a loss of the whole logits."""
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def backward(loss: Tensor) -> None:
    """Goes backward."""
    loss.backward()  # type: ignore[no-untyped-call]


def micro_batch_by_micro_batch(model: nn.Module, x: Tensor) -> None:
    """Takes a step of the model itself."""
    for part in x.chunk(M):
        backward(loss_of(model(input_ids=part, use_cache=False), part))


def without_gradients(model: nn.Module, parts: Sequence[Tensor]) -> None:
    """Calls the model, or the pipe that splits one part by itself."""
    with torch.no_grad():
        for part in parts:
            model(input_ids=part, use_cache=False)


def ways_of(mode: str) -> tuple[dict[str, Way], pipert.ModulePipe]:
    """Returns the ways that take turns, with a checkpoint mode, and their pipe."""
    torch.manual_seed(0)
    plain: Any = LlamaForCausalLM(SMALL)
    model, x = copy.deepcopy(plain), torch.randint(1, 256, (4 * M, 8))
    cut = f"model.layers.{LAYERS // 2}"
    pipe = pipert.pipeline(model, [cut], devices=["cpu"] * 2, chunks=M, checkpoint=mode)
    step = partial(
        pipe.forward_backward, input_ids=x, use_cache=False, target=x, loss_fn=loss_of
    )
    ways: dict[str, Way] = {
        "plain": lambda: micro_batch_by_micro_batch(plain, x),
        "call": lambda: backward(loss_of(pipe(input_ids=x, use_cache=False), x)),
        **{name: partial(step, schedule=name) for name in ("1f1b", "zb-h1")},
    }
    if mode == "always":
        peer = copy.deepcopy(plain).train()
        peer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        ways["reentrant"] = lambda: micro_batch_by_micro_batch(peer, x)
    else:
        words = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        ways |= {
            "plain no grad": lambda: without_gradients(plain, x.chunk(M)),
            "no grad": lambda: without_gradients(pipe, [x]),
            "plain generate": lambda: plain.generate(x[:4], **words),
            "generate": lambda: model.generate(x[:4], **words),
        }
    return ways, pipe


def measured(mode: str, repeats: int) -> dict[str, float]:
    """Returns the seconds of the host for a layer and a micro-batch, or a token."""
    ways, pipe = ways_of(mode)

    def seconds(name: str) -> float:
        begin = time.process_time()
        ways[name]()
        return time.process_time() - begin

    with pipe:
        samples = take_turns(seconds, [*ways], repeats=repeats)
    times = {name: TOKENS if "generate" in name else M for name in ways}
    return {name: min(samples[name]) / (LAYERS * times[name]) for name in ways}


def compared(mode: str, found: dict[str, float], slack: float) -> list[Row]:
    """Returns the rows of one mode, each beside its peer."""
    made = []
    for name, bar in BARS[mode].items():
        peer = BESIDE.get(name, "plain" if mode == "never" else "reentrant")
        ratio = found[name] / found[peer]
        missed = f"{mode}, {name}: {ratio:.2f}, the bar is {bar:.2f}"
        cells = mode, name, f"{1e6 * found[name]:.0f}", peer, f"{ratio:.2f}", f"{bar:.2f}"
        made.append(Row(cells, (missed,) if ratio > bar * slack else ()))
    return made


def kernels(tokens: int) -> tuple[float, float]:
    """Counts the seconds of a forward, and of a backward, of one layer with so many tokens."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LARGE).bfloat16()
        x = torch.empty(1, tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
        places = model.model.rotary_emb(x, torch.arange(tokens)[None])
    with counting():
        y = model.model.layers[0](x, position_embeddings=places)
        forward = counted_seconds() or 0.0
        y = y[0] if isinstance(y, tuple) else y
        y.backward(torch.empty_like(y))
        return forward, (counted_seconds() or 0.0) - forward


def fed(mode: str, found: dict[str, float]) -> list[Row]:
    """Returns how many GPUs are busy in each way of training."""
    made, names = [], ("plain" if mode == "never" else "reentrant", "call", "1f1b", "zb-h1")
    for tokens in (2048, 4096):
        forward, back = kernels(tokens)
        seconds = forward + back + forward * (mode == "always")
        gpus = [f"{seconds / found[name]:.1f}" for name in names]
        made.append(Row((str(tokens), mode, f"{1e3 * seconds:.2f}", *gpus)))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    last, table = dict[str, dict[str, float]](), list[Row]()
    for mode in BARS:

        def measure(mode: str = mode) -> list[Row]:
            last[mode] = measured(mode, 6 if arguments.short else 24)
            return compared(mode, last[mode], arguments.slack)

        table += rows(measure, check=arguments.check)
    columns = "checkpoint", "way", "us", "beside", "ratio", "bar"
    missed = report("Host, for each layer and micro-batch (generate: token)", columns, table)
    ways = "tokens", "checkpoint", "kernels, ms", "no pipe", "call", "1f1b", "zb-h1"
    busy = [row for mode in BARS for row in fed(mode, last[mode])]
    report("GPUs that one interpreter keeps busy with a Llama of 7B: computed", ways, busy)
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
