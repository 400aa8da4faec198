"""The command line of the service."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from models.gpt import ModelConfig
from train_gpt import SCHEDULES, devices, integers, place, positive

__all__ = ["kept", "model_config", "read_options"]

# What a saved state depends on, besides the shape of the model. Devices and the number of pieces
# may change from one start to the next.
_KEPT = ("batch", "lr", "warmup", "seed")


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options; an error in them exits with a message and code 2."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        config = model_config(options)
        for name in ("lr", "timeout", "stale_after"):
            if not getattr(options, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0")
        if not 0 <= options.port < 65536:
            raise ValueError(f"--port must be from 0 to 65535, not {options.port}")
        if not options.data.is_dir():
            raise ValueError(f"--data must be a folder, and {options.data} is none")
        place(options, config, 4 * options.timeout)
    except ValueError as error:
        parser.error(str(error))
    return options


def model_config(options: argparse.Namespace) -> ModelConfig:
    """The shape of the model."""
    return ModelConfig(**{name: getattr(options, name) for name in asdict(ModelConfig())})


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that must match a saved state."""
    return asdict(model_config(options)) | {name: getattr(options, name) for name in _KEPT}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT without end, from a folder of text that may grow.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    modes = ("always", "except_last", "never")
    add, model = parser.add_argument, ModelConfig(dropout=0.1)
    add("--data", type=Path, required=True, help="a folder of text files; it may grow")
    add("--state", type=Path, required=True, help="a folder for saved states, of this run alone")
    add("--steps", type=positive, help="end after this step; else never")
    add("--save-every", type=positive, default=100, help="steps; new text is looked for then, too")
    add("--keep", type=positive, default=3, help="saved states")
    add("--log-every", type=positive, default=10, help="steps")
    add("--batch", type=positive, default=16, help="windows of text in a mini-batch")
    add("--context", type=positive, default=model.context, help="bytes the model sees")
    add("--width", type=positive, default=model.width, help="features of a token")
    add("--layers", type=positive, default=model.layers, help="transformer blocks")
    add("--heads", type=positive, default=model.heads, help="attention heads of a block")
    add("--dropout", type=float, default=model.dropout, help="probability")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--warmup", type=positive, default=100, help="steps until the learning rate is there")
    add("--seed", type=int, default=0, help="of the parameters, the order of the text and dropout")
    add("--devices", type=devices, default=gpus or "cpu,cpu", help="one partition goes to each")
    add("--distributed", action="store_true", help="under torchrun: one partition goes to each"
        " process, in place of --devices; all read the same --data")  # fmt: skip
    add("--balance", type=integers, help="layers (blocks + 2) on each device; else evenly spread")
    add("--chunks", type=positive, default=4, help="micro-batches; more if memory does not suffice")
    add("--checkpoint", choices=modes, help="micro-batches to recompute; else all but the last, or"
        " none with 1f1b and eager-1f1b")  # fmt: skip
    add("--schedule", choices=SCHEDULES, default="autograd", help="what goes backward when")
    add("--host", default="127.0.0.1", help="address to serve /metrics and /healthz at")
    add("--port", type=int, default=9464, help="0 for any that is free; it is logged")
    add("--stale-after", type=float, default=120, help="unhealthy after seconds without a step")
    add("--timeout", type=float, default=600, help="seconds for a forward; then the process ends."
        " A process waits four times as long for others")  # fmt: skip
    return parser
