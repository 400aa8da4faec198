"""Takes the gradients that a custom function adds to weights by itself, in its own backward.

Reversible layers and hand-written checkpoints call ``backward`` inside of their ``backward``, which
adds to ``.grad`` at once: a step that fails later would leave parts of gradients there. So while
``B[i,j]`` goes through functions written in Python, what arrives on this thread at the weights of
the partition, of the model's own code or of the loss goes to the partition's sums instead, and is
delivered with them. All of the backward
runs on this thread meanwhile, on GPUs as well, so nobody else's gradients are taken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import hooks_on_grad, tensor_hooks
from pipert.autograd.leaves import accumulators
from pipert.stage.gradients import Gradients

__all__: list[str] = []


def weights_beside(partitions: Iterable[nn.Module], modules: Iterable[Any]) -> list[Tensor]:
    """Return the parameters of those ``modules`` that are modules, if no partition has them."""
    known = {weight for partition in partitions for weight in partition.parameters()}
    found = [each.parameters() for each in modules if isinstance(each, nn.Module)]
    return [weight for weight in {*chain.from_iterable(found)} if weight not in known]


@contextlib.contextmanager
def taking_gradients(weights: Iterable[Tensor], sums: Gradients) -> Iterator[None]:
    """Add what arrives at ``weights`` in the block, on this thread, to ``sums``."""
    wanted = [weight for weight in weights if weight.requires_grad]
    held = accumulators(wanted)  # views, which hold the nodes that add to ``.grad``
    here, handles = threading.get_ident(), list[Any]()
    try:
        for weight, view in zip(wanted, held, strict=True):
            node: Any = view.grad_fn
            take = partial(_take, here, sums, weight)
            handles.append(node.next_functions[0][0].register_prehook(take))
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _take(
    thread: int, sums: Gradients, weight: Tensor, arriving: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    if threading.get_ident() != thread:
        return None  # another caller's, which passes
    if tensor_hooks(weight) or hooks_on_grad(weight):
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} has a hook, and a custom autograd function "
            "calls backward by itself: the hook would see parts of the gradient of a step. Remove "
            "the hook, or use loss.backward()"
        )
    sums.add((weight,), arriving)
    return (None,)
