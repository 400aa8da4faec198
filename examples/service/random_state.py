"""Saves and restores all random state: torch's generators and Python's."""

from __future__ import annotations

import random
from typing import Any

import torch

__all__ = ["get_random_state", "set_random_state"]


def get_random_state() -> dict[str, Any]:
    """Returns tensors and plain values, which ``torch.load(..., weights_only=True)`` accepts."""
    version, words, gauss = random.getstate()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "python": [version, torch.tensor(words), gauss],  # one tensor saves faster than 625 numbers
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores what :func:`get_random_state` returned; skips missing GPUs."""
    torch.set_rng_state(state["cpu"])
    for index, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, index)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
