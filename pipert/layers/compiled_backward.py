"""Lets compiled layers run backward on several GPUs at once.

AOTAutograd runs the backward of a compiled layer in its caller's context variables: in the one
``Context`` object that ``torch.autograd`` records for all its threads, which only one of them can
enter at a time. A model on one GPU runs backward in one thread; a pipe has one per GPU, and the
second would raise "cannot enter context". So each node of a compiled layer gets a copy of that
context before it runs (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from pipert._typing import Value
from pipert.autograd.thread_locals import get_thread_local, set_thread_local
from pipert.batch.tensors import differentiable


def call_compiled(call: Callable[..., Value], *args: Any, **kwargs: Any) -> Value:
    """Call a compiled layer whose backward may run at the same time as other partitions'."""
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
