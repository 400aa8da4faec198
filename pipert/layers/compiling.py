"""Keeps torch.compile and the threads of a pipe from disturbing each other.

A compiled layer is compiled at its first call, and again for inputs that its code does not cover:
on a worker, or on the thread of a backward when it is recomputed. Several threads may compile at
the same moment. The rules:

1. One thread compiles at a time, under dynamo's process-wide lock.
2. Calls of compiled code find their code without that lock, but wait while another thread
   compiles: before 2.14 torch has one flag for all threads that says whether one traces, and would
   refuse the call.
3. dynamo saves the states of the default generators before it compiles and restores them
   afterwards. A compiled layer is one that might draw, so these are its task's
   (``layers/random_numbers.py``).
4. Compiled layers run backward on several GPUs at once. AOTAutograd runs their backward in the
   caller's context variables: in the one ``Context`` object that ``torch.autograd`` records for
   all its threads, which only one of them can enter at a time; the second would raise "cannot
   enter context". So each node of a compiled layer gets a copy of it before it runs (torch 2.13).
5. A pipe cannot be compiled, exported or traced. Its layers run on threads that such tools do not
   see, so they would capture pipert itself. torch.jit.script and torch.fx fail by themselves.
6. ``torch.cond`` and its like are refused with gradients in tasks that run at the same time. torch
   makes graphs of the functions that they get, in each forward and again in its backward. A thread
   that does so replaces ``nn.Module.__call__`` and flags of the whole process. Two at once raise
   errors from inside torch, and leave the flags on for whoever comes next. So torch's kernels of
   these operators are wrapped, once; outside of such tasks nothing else changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipert._torch import (
    autograd_key,
    compile_lock,
    dispatch_modes,
    forward_level,
    higher_order,
    is_autograd_compiled,
    is_traced_by_fx,
    is_traced_by_jit,
    transforms,
    watcher,
)
from pipert._typing import Value
from pipert.autograd.engine import get_thread_local, set_thread_local
from pipert.batch.tensors import differentiable, tensors_of
from pipert.errors import TransformError
from pipert.layers.intercepted import compiled_call
from pipert.layers.modules import modules_of
from pipert.layers.random_numbers import current_task
from pipert.recompute.nodes import refuse_compiled_autograd


def refuse_tracers(is_step: bool = False) -> None:
    """Refuse a call of a pipe that is traced, transformed, or watched by torch.compile.

    A step is refused under compiled autograd, too.

    Raises:
        TransformError: the call is one of these.
    """
    is_traced = torch.compiler.is_exporting() or is_traced_by_jit()
    if is_traced or torch.compiler.is_dynamo_compiling() or callable(watcher()):
        raise TransformError(
            "a pipe was called inside of torch.compile, torch.export or torch.jit.trace, which do "
            "not see its threads. Compile each layer, then wrap: Pipe(nn.Sequential("
            "*[torch.compile(layer) for layer in module]), ...); in a compiled function of yours, "
            "call torch.compiler.disable(pipe). Export the plain module, or nn.Sequential(*pipe)"
        )
    if transforms() or forward_level() >= 0:
        raise TransformError(
            "a pipe was called inside of a torch.func transform, such as grad or vmap, or of "
            "forward-mode differentiation, where its workers would compute without it. Use "
            "backward or torch.autograd.grad, or call the plain module"
        )
    if is_step and torch.is_grad_enabled() and is_autograd_compiled():
        refuse_compiled_autograd()


def is_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile or torch.jit made or changed any part of the layer."""
    return any(map(is_compiled_itself, modules_of(layer)))


def is_compiled_itself(module: nn.Module) -> bool:
    """Like :func:`is_compiled`, but without the modules inside ``module``."""
    # Not isinstance: torch._dynamo takes long to import, and is only loaded once it is used.
    return (
        type(module).__module__.startswith(("torch._dynamo", "torch.jit"))
        or compiled_call(module) is not None
    )


def call_compiled(call: Callable[..., Value], *args: Any, **kwargs: Any) -> Value:
    """Call a compiled layer whose backward may run at the same time as other partitions'."""
    if is_traced_by_fx():  # so torch would refuse to call it, before 2.14
        with compile_lock():
            pass  # another thread has compiled
    makers = [x.grad_fn for x in differentiable((args, kwargs))[0]]
    value = call(*args, **kwargs)
    give_own_contexts(differentiable(value)[0], makers)
    return value


def give_own_contexts(ys: Iterable[Tensor], makers: Iterable[Node | None]) -> None:
    """Make each compiled function in the graph of ``ys`` run backward in a context of its own.

    The search stops at ``makers``, the nodes that made the inputs. They are taken before the call,
    since a layer may change inputs in place.
    """
    seen = {*makers, None}
    left = [y.grad_fn for y in ys]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left.extend(child for child, _ in node.next_functions)
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(_use_own_context)


def _use_own_context(gradients: tuple[Tensor, ...]) -> None:
    # Affects this node only: the engine restores its thread-local state for each node.
    context = get_thread_local("context")
    if context is not None:
        set_thread_local("context", context.copy())


_NAMES = ("cond", "switch", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention")
_TRACING = ("FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode")
"""Modes in which operations are being traced, or run on tensors without data."""


@functools.cache
def refuse_at_once() -> None:
    """Refuse them from now on, in tasks of runs in which several workers compute at once."""
    autograd = autograd_key
    for name in _NAMES:
        operator = higher_order.get(name)
        if operator is not None and autograd in operator.py_kernels:
            kernel = operator.py_kernels.pop(autograd)
            operator.py_impl(autograd)(_checked(name, kernel))


def _checked(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def check(*args: Any, **kwargs: Any) -> Any:
        task = current_task() if torch.is_grad_enabled() else None
        is_traced = any(type(mode).__name__ in _TRACING for mode in dispatch_modes())
        if task is not None and task.run.is_concurrent and not is_traced:
            if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))[0]):
                raise TransformError(
                    f"a layer calls torch's {name} with gradients, for which torch makes graphs "
                    "with state of the whole process, while other workers compute. Compile the "
                    "layer (torch.compile), use torch.where, or a plain if or for; or take one "
                    "micro-batch, chunks=1, and checkpoint='never'"
                )
        return kernel(*args, **kwargs)

    return check
