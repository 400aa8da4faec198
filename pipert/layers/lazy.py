"""Lets lazy layers draw their parameters beside a task's other random numbers.

``R[i,j]`` draws the numbers of ``F[i,j]`` again, but finds the parameters initialised: a dropout
behind them would get the numbers that they got.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from pipert.layers.random_numbers import apart

__all__: list[str] = []

_METHOD = "initialize_parameters"


def initialise_apart(module: nn.Module) -> None:
    """Let a lazy module, at its first call, draw its parameters in :func:`apart`."""
    module.__dict__.setdefault(_METHOD, partial(_initialise, module))


def _initialise(module: Any, *args: Any, **kwargs: Any) -> None:
    del module.__dict__[_METHOD]  # the class has it, too, until it is initialised
    with apart():
        module.initialize_parameters(*args, **kwargs)
