"""Breakages of a pipe over several processes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BREAKAGES"]

BOUNDARY, GRADIENTS = "pipert/distributed/boundary.py", "pipert/distributed/gradients.py"
MEETING, STAGES = "pipert/distributed/meeting.py", "pipert/distributed/stages.py"
ROUTES, NUMBERS = "pipert/skip/routes.py", "pipert/layers/random_numbers.py"
EQUALITY = ("tests/distributed/test_equality.py",)
PREPARED = "pipert/distributed/prepared.py"
FEATURES = ("tests/distributed/test_features.py",)
FAULTS = ("tests/distributed/test_rank_faults.py",)
REPLICAS = ("tests/distributed/test_data_parallel.py",)
AGREEMENT, RUNTIME = "pipert/distributed/agreement.py", "pipert/distributed/runtime.py"

BREAKAGES = [
    Mutant(
        "padding-of-the-next", BOUNDARY,
        "of a ragged micro-batch what fills it up is taken for its values",
        "tensor[: prod(shape)].view(shape)", "tensor[-prod(shape) :].view(shape)", EQUALITY,
    ),
    Mutant(
        "tied-gradient-of-one-rank", GRADIENTS,
        "a rank's copy of a shared parameter gets this rank's gradient alone",
        "dist.all_reduce(parameter.grad, group=group)", "pass", FEATURES,
    ),
    Mutant(
        "accumulated-gradient-dropped", GRADIENTS,
        "what a parameter's gradient was before the mini-batch is lost",
        "leaf.grad = before.add_(new.mul_(factor))", "new.mul_(factor)", EQUALITY,
    ),
    Mutant(
        "meeting-updates-statistics", MEETING,
        "the micro-batch that is passed first to see shapes moves running statistics",
        "with _buffers_kept(module), unsynchronized", "with unsynchronized", FEATURES,
    ),
    Mutant(
        "meeting-changes-the-input", MEETING,
        "a first layer that works in place changes its input twice at a new shape",
        "moved(running.inputs[i], device, copy=True)", "moved(running.inputs[i], device)", EQUALITY,
    ),
    Mutant(
        "next-mini-batch-in-the-outputs", PREPARED,
        "outputs that are what has arrived are overwritten by the next mini-batch",
        "                _renew(arrived)", "                pass", EQUALITY,
    ),
    Mutant(
        "split-where-weights-are-lost", "pipert/distributed/halves.py",
        "weights that are on no way from an input get no gradient, or a part, where B is split",
        "return root in between and _has_one_branch_point_each(between)", "return True",
        ("tests/distributed/test_split_backward.py",),
    ),
    Mutant(
        "change-of-one-of-two-views", STAGES,
        "what shared memory with another tensor is changed in place, and the other is not",
        "shared = self.arriving.shared(i)", "pass", FAULTS,
    ),
    Mutant(
        "another-call-taken-for-this", AGREEMENT,
        "a rank that calls grad_norm() alone is taken to begin the mini-batch of the others",
        'self.require_same("call", [begun for begun, _, _ in reports])', "pass", FAULTS,
    ),
    Mutant(
        "arriving-leaf-changed-in-place", STAGES,
        "a first layer that works in place gets the leaf that arrived",
        "return rebuild(order.join(order.ENTRANCE, *xs)) if xs else x", "return x", FEATURES,
    ),
    Mutant(
        "structure-of-the-first-time", BOUNDARY,
        "what is no tensor, or comes twice, is what it was when the ranks met the shape",
        "if not _equal(_frame(value), self._frames[kind]):", "if False:", FAULTS,
    ),
    Mutant(
        "consequence-told", AGREEMENT,
        "a rank that fails on what another has failed to send raises its own error",
        "and failure.place == first.place", "", FAULTS,
    ),
    Mutant(
        "group-of-30-minutes", "pipert/distributed/groups.py",
        "ranks wait for one that does not answer for as long as torch's groups do by default",
        "list(ranks), store.timeout, backend,", "list(ranks), None, backend,", FAULTS,
    ),
    Mutant(
        "gradient-in-the-bucket", GRADIENTS,
        "what is put aside is memory of a bucket of DDP, which the mini-batch overwrites",
        "dx.clone() if are_views and dx is not None else dx", "dx", REPLICAS,
    ),
    Mutant(
        "kinds-of-one-replica", PREPARED,
        "replicas meet other micro-batches, and wait for each other's collectives",
        "for each in signatures for one in each", "for each in [mine] for one in each", REPLICAS,
    ),
    Mutant(
        "forward-drops-gradients", RUNTIME,
        "an evaluation loses the gradients that sharded parameters have",
        "gradients = Gradients(list(dict.fromkeys(parameters)), is_step",
        "gradients = Gradients(list(dict.fromkeys(parameters)) if is_step else [], is_step",
        REPLICAS,
    ),
    Mutant(
        "skip-not-passed-on", ROUTES,
        "a skip does not leave the partitions that it only passes",
        "if first[key] <= j < last[key]", "if first[key] == j < last[key]", FEATURES,
    ),
    Mutant(
        "seed-of-each-rank", NUMBERS,
        "ranks other than the first forget the seed that was agreed on",
        "self._number = number\n\n    def forget(self) -> None:",
        "pass\n\n    def forget(self) -> None:", FEATURES,
    ),
]
