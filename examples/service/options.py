"""Parses the command line of the service."""

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

# The options, besides the shape of the model, that a resumed run must not change. It may change the
# devices and the number of micro-batches.
_KEPT = ("batch", "lr", "warmup", "seed")


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; a wrong one exits with a message and code 2."""
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
    """Returns the shape of the model."""
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
    add("--state", type=Path, required=True, help="a folder for the saved states of this run only")
    add("--steps", type=positive, help="end after this step; if omitted, never")
    add("--save-every", type=positive, default=10, help="steps between saves and looks for text:"
        " as many are lost at most if the process is killed")  # fmt: skip
    add("--keep", type=positive, default=3, help="number of saved states to keep")
    add("--log-every", type=positive, default=10, help="steps between log lines")
    add("--batch", type=positive, default=16, help="windows of text in a mini-batch")
    add("--context", type=positive, default=model.context, help="bytes in a window")
    add("--width", type=positive, default=model.width, help="features per token")
    add("--layers", type=positive, default=model.layers, help="transformer blocks")
    add("--heads", type=positive, default=model.heads, help="attention heads per block")
    add("--dropout", type=float, default=model.dropout, help="dropout probability")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=positive, default=100, help="steps until the learning rate peaks")
    add("--seed", type=int, default=0, help="seed of the parameters, the text order and dropout")
    add("--devices", type=devices, default=gpus or "cpu,cpu", help="one device per partition")
    add("--distributed", action="store_true", help="under torchrun: one partition per process,"
        " instead of --devices; all processes read the same --data")  # fmt: skip
    add("--balance", type=integers, help="layers (blocks + 2) per device; if omitted, even")
    add("--chunks", type=positive, default=4, help="micro-batches; raised if memory runs out")
    add("--checkpoint", choices=modes, help="micro-batches to recompute; if omitted, all but the"
        " last, or none with 1f1b and eager-1f1b")  # fmt: skip
    add("--schedule", choices=SCHEDULES, default="autograd", help="order of the tasks")
    add("--host", default="127.0.0.1", help="address that serves /metrics and /healthz")
    add("--port", type=int, default=9464, help="0 for any free port, which is logged")
    add("--stale-after", type=float, default=120, help="unhealthy after seconds without a step")
    add("--timeout", type=float, default=600, help="seconds for a forward; then the process ends."
        " A process waits four times as long for the others")  # fmt: skip
    return parser
