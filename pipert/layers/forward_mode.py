"""Refuses forward-mode differentiation in several tasks at once.

torch has one level of it for the whole process. A ``torch.func.jvp`` that begins while another
thread is inside one computes in that thread's level, and its tangents disappear, without an error,
when that thread leaves. So a kernel looks at each tensor that gets a tangent.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from pipert._torch import dual_of, transforms
from pipert.errors import TransformError
from pipert.layers.dispatch_keys import Key


def register(key: Key) -> None:
    """Check each tensor that gets a tangent while ``key`` is included."""
    operation = dual_of.default

    def make_dual(primal: Tensor, tangent: Tensor, level: int) -> Any:
        if _nesting_of_process() > _nesting_of_thread():
            raise TransformError(
                "a layer differentiates in forward mode (torch.func.jvp, jacfwd, hessian) while "
                "another thread does, and torch has one level of it for the whole process. Use "
                "jacrev or vjp, or a threading.Lock around it"
            )
        with key.excluded():
            return operation(primal, tangent, level)

    key.register(operation, make_dual)


def _nesting_of_process() -> int:
    # Loaded by whoever called torch.func.jvp; torch.autograd.forward_ad alone refuses by itself.
    module: Any = sys.modules.get("torch._functorch.eager_transforms")
    return 0 if module is None else int(module.JVP_NESTING)


def _nesting_of_thread() -> int:
    return sum(level.key().name == "Jvp" for level in transforms() or ())
