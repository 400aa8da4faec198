"""Differentiates the graph of a partition in ``B[i,j]`` of a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import tensor_hooks
from pipert.autograd import order
from pipert.autograd.engine import differentiate
from pipert.autograd.hooks import hiding_partial_gradients
from pipert.autograd.leaves import Reachable, accumulators, find_leaves, is_in_python
from pipert.autograd.weight_gradients import defer_weights, differentiate_recomputed
from pipert.batch.tensors import alone
from pipert.errors import NestedCheckpointError
from pipert.stage.gradients import Gradients as Sums
from pipert.stage.stage import Stage
from pipert.stage.step import PartitionGraph
from pipert.stage.step_boundary import StepBoundary
from pipert.workers.context import NOTHING

Gradients = Sequence[Tensor | None]
Edges = Sequence[Any]


def begin(cut: StepBoundary, i: int, graph: PartitionGraph) -> tuple[list[Any], list[Tensor]]:
    """Return the edges at which ``B[i,j]`` begins, with gradients: the loss, and what has left.

    The latest partition that used a tensor comes first, as in the plain module's backward.
    """
    ys, dys = list[Any](), list[Tensor]()
    if graph.loss is not None:
        ys.append(order.edge_of(graph.loss))
        dys.append(cut.step.loss.gradient_of(i, graph.loss))
    for origin, crossings in groupby(reversed(graph.left), attrgetter("j")):
        pairs = [(c.left, c.gradient) for c in crossings if c.gradient is not None]
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            ys += edges
            dys += cut.copies.bring(i, gradients, origin)
    graph.left.clear()  # else gradients on other devices would stay until the end
    return ys, dys


def differentiate_partition(
    stage: Stage, cut: StepBoundary, i: int, graph: PartitionGraph, ys: Edges, dys: Sequence[Tensor]
) -> None:
    """Note the gradients of what has entered; add those of the weights to the sums.

    In a plan with ``W[i,j]``, what that will compute is noted, and left out.
    """
    if not ys:
        return
    ends = list(map(_node, ys))
    if graph.find_reachable is None:
        reachable = find_leaves(ends, [order.ENTRANCE], cut.numbers())
    else:
        reachable = _find_or_reuse(stage, cut, graph, graph.find_reachable, ends)
    _refuse_own_hooks(cut, reachable.leaves)
    run = partial(gradients_of, stage, reachable)
    xs = [crossing.entered for crossing in graph.entered]
    later = cut.deferred.setdefault(i, []) if cut.defers_weights else None
    if graph.segments is not None:
        graph.segments.in_step = partial(differentiate_recomputed, later)
    try:
        if later is None:
            leaves = reachable.leaves
            found = run(ys, (*xs, *leaves), dys)
        else:
            found, leaves = defer_weights(ys, xs, dys, reachable, later, run)
    finally:
        if graph.segments is not None:  # which a tensor that a layer keeps holds
            graph.segments.in_step = None
    dxs = [None if dx is None else alone(dx) for dx in found[: len(xs)]]
    for crossing, dx in zip(graph.entered, dxs, strict=True):
        crossing.gradient = dx
    if stage.place.j == 0:
        cut.step.input_gradients[i] = dxs
    cut.copies.let_others_copy(i)  # before the sums: the copy needs none of them
    cut.gradients.add(leaves, found[len(xs) :])


_node: Callable[[Any], Any] = attrgetter("node")


def _find_or_reuse(
    stage: Stage,
    cut: StepBoundary,
    graph: PartitionGraph,
    find: Callable[[list[Any]], Reachable],
    ends: list[Any],
) -> Reachable:
    """Return what is behind the ends of a graph of any model, in which all may be known.

    To walk along it costs a tenth of the forward. So the leaves of a third micro-batch are those of
    two before it, if these have used the same ones, and it has made as many nodes, of no function
    written in Python. It may be the first to use another weight, so all in its reach are added.
    """
    key = graph.made, len(ends)
    before, is_settled = cut.leaves.get(key, (None, False))
    if before is not None and is_settled:
        return Reachable(before, [], [], [])
    reachable = find(ends)
    in_python = is_in_python(map(type, reachable.nodes), _ENGINELESS)
    if cut.defers_weights or reachable.others or in_python:
        cut.leaves.pop(key, None)
        return reachable
    leaves = {id(leaf): leaf for leaf in reachable.leaves}
    is_settled = before is not None and [*map(id, before)] == [*leaves]
    if is_settled:
        weights = (*stage.layers.parameters(), *cut.step.extra_parameters())
        leaves.update({id(weight): weight for weight in weights if weight.requires_grad})
    cut.leaves[key] = [*leaves.values()], is_settled
    return reachable


def gradients_of(
    stage: Stage,
    reachable: Reachable,
    ys: Sequence[Any],
    wanted: Sequence[Any],
    dys: Sequence[Tensor],
) -> Gradients:
    """Differentiate ``ys`` by ``wanted`` on this thread.

    ``reachable`` is the graph behind ``ys``. It is retained if other micro-batches go backward
    through a part of it, which is the caller's.
    """
    assert stage.step_boundary is not None
    weights, inner = reachable.leaves, NOTHING
    if reachable.nodes and is_in_python(map(type, reachable.nodes), _ENGINELESS):
        others = stage.step_boundary.step.extra_parameters()
        weights = [*weights, *stage.layers.parameters(), *others]
        inner = taking_gradients(weights, stage.step_boundary.gradients)
    compute = partial(differentiate, retain_graph=bool(reachable.others))
    try:
        with inner:
            return hiding_partial_gradients(weights, compute, ys, wanted, dys)
    except BaseException as error:
        # When a node raises, its thread keeps the nodes that were ready until its next backward.
        torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))
        if isinstance(error, RuntimeError):
            _refuse_reentrant(error)
        raise


def _refuse_reentrant(error: RuntimeError) -> None:
    """Replace torch's error about its reentrant checkpoint by one that says what to do in a step.

    Such a checkpoint runs a backward of its own in the middle of ``B[i,j]``, which adds to
    ``.grad`` itself: a part for each micro-batch, even in a step that fails.

    Raises:
        NestedCheckpointError: ``error`` is about a reentrant checkpoint.
    """
    if str(error).startswith("When use_reentrant=True"):
        raise NestedCheckpointError(
            "a layer used torch.utils.checkpoint with use_reentrant=True in forward_backward, "
            "where it would add a part of each gradient to .grad by itself. Use "
            "use_reentrant=False (transformers: gradient_checkpointing_enable("
            "gradient_checkpointing_kwargs={'use_reentrant': False})), or let the pipe checkpoint, "
            "with checkpoint='always'"
        ) from error


_ENGINELESS = ("_EnterBackward", "_CheckpointBackward", "CompiledFunctionBackward")
"""Functions written in Python whose backward is known to call no engine."""


def _refuse_own_hooks(cut: StepBoundary, leaves: Iterable[Tensor]) -> None:
    """Refuse hooks that a layer puts on a weight in its forward: one for each micro-batch.

    Raises:
        RuntimeError: a leaf has a hook that was registered during the step.
    """
    for leaf in leaves:
        if (hooks := tensor_hooks(leaf)) and max(hooks) >= cut.step.first_hook:
            raise RuntimeError(
                f"a hook on a weight of shape {tuple(leaf.shape)} was registered in a forward, "
                "which does so for each micro-batch, so each of these hooks would be called with "
                "the whole gradient; register it once, before the step"
            )


def unpartitioned_weights(partitions: Iterable[nn.Module], modules: Iterable[Any]) -> list[Tensor]:
    """Return the parameters of those ``modules`` that are modules, if no partition has them."""
    known = {weight for partition in partitions for weight in partition.parameters()}
    found = [each.parameters() for each in modules if isinstance(each, nn.Module)]
    return [weight for weight in {*chain.from_iterable(found)} if weight not in known]


@contextlib.contextmanager
def taking_gradients(weights: Iterable[Tensor], sums: Sums) -> Iterator[None]:
    """Add what arrives at ``weights`` in the block, on this thread, to ``sums``.

    Reversible layers and hand-written checkpoints call ``backward`` inside of their ``backward``,
    which adds to ``.grad`` at once: a step that fails later would leave parts of gradients there.
    So ``B[i,j]`` takes what arrives at the weights of the partition, of the model's own code and of
    the loss, and it is delivered with the sums. All of the backward runs on this thread meanwhile,
    on GPUs as well, so nobody else's gradients are taken.
    """
    wanted = list({id(weight): weight for weight in weights if weight.requires_grad}.values())
    held = accumulators(wanted)  # views, which hold the nodes that add to ``.grad``
    here, handles, taken = threading.get_ident(), list[Any](), list[Any]()
    try:
        for weight, view in zip(wanted, held, strict=True):
            node: Any = view.grad_fn
            take = partial(_take, here, taken, weight)
            handles.append(node.next_functions[0][0].register_prehook(take))
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        for handle in handles:
            handle.remove()
    for weight, arriving in taken:  # not where they arrive, on the streams of the weights' nodes
        sums.add((weight,), arriving)


def _take(
    thread: int, taken: list[Any], weight: Tensor, arriving: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    if threading.get_ident() != thread:
        return None  # another caller's, which passes
    taken.append((weight, arriving))
    return (None,)
