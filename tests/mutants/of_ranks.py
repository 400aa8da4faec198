"""Lists breakages of a pipe over several processes."""

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
        "the padding of a ragged micro-batch counts as values",
        "tensor[: prod(shape)].view(shape)", "tensor[-prod(shape) :].view(shape)", EQUALITY,
    ),
    Mutant(
        "tied-gradient-of-one-rank", GRADIENTS,
        "a rank's copy of a shared parameter gets only this rank's gradient",
        "dist.all_reduce(_own_part(parameter.grad), group=group)", "pass", FEATURES,
    ),
    Mutant(
        "accumulated-gradient-dropped", GRADIENTS,
        "a parameter's gradient from before the mini-batch is lost",
        "leaf.grad = before.add_(new)", "pass", EQUALITY,
    ),
    Mutant(
        "meeting-updates-statistics", MEETING,
        "the micro-batch that is passed first to find shapes moves running statistics",
        "with _buffers_kept(module), unsynchronized", "with unsynchronized", FEATURES,
    ),
    Mutant(
        "meeting-changes-the-input", MEETING,
        "a first layer that works in place changes its input twice at a new shape",
        "moved(running.inputs[i], device, copy=True)", "moved(running.inputs[i], device)", EQUALITY,
    ),
    Mutant(
        "next-mini-batch-in-the-outputs", PREPARED,
        "outputs that are received tensors are overwritten by the next mini-batch",
        "                _renew(arrived)", "                pass", EQUALITY,
    ),
    Mutant(
        "split-where-weights-are-lost", "pipert/distributed/halves.py",
        "if B is split, weights that no input leads to get no gradient, or a part of it",
        "return root in between and _has_one_branch_point_each(between)", "return True",
        ("tests/distributed/test_split_backward.py",),
    ),
    Mutant(
        "change-of-one-of-two-views", STAGES,
        "a tensor that shared memory with another is changed in place, and the other does not "
        "change",
        "shared = self.arriving.shared(i)", "pass", FAULTS,
    ),
    Mutant(
        "another-call-taken-for-this", AGREEMENT,
        "a rank that alone calls grad_norm() seems to begin the other ranks' mini-batch",
        'self.require_same("call", [begun for begun, _, _ in reports])', "pass", FAULTS,
    ),
    Mutant(
        "arriving-leaf-changed-in-place", STAGES,
        "a first layer that works in place gets the received leaf",
        "return rebuild(order.join(order.ENTRANCE, *xs)) if xs else x", "return x", FEATURES,
    ),
    Mutant(
        "structure-of-the-first-time", BOUNDARY,
        "values that are not tensors, and which tensors occur twice, stay as they were when the "
        "ranks first met the shape",
        "if not _equal(_frame(value), self._frames[kind]):", "if False:", FAULTS,
    ),
    Mutant(
        "consequence-told", AGREEMENT,
        "a rank that fails because another failed to send raises its own error",
        "and failure.place == first.place", "", FAULTS,
    ),
    Mutant(
        "group-of-30-minutes", "pipert/distributed/groups.py",
        "ranks wait for one that does not answer as long as torch's groups do by default",
        "list(ranks), timeout, backend,", "list(ranks), None, backend,", FAULTS,
    ),
    Mutant(
        "gradient-in-the-bucket", GRADIENTS,
        "a gradient put aside is memory of a DDP bucket, which the mini-batch overwrites",
        "dx.clone() if are_views and dx is not None else dx", "dx", REPLICAS,
    ),
    Mutant(
        "kinds-of-one-replica", PREPARED,
        "replicas meet different micro-batches, and wait for each other's collectives",
        "for each in signatures for one in each", "for each in [mine] for one in each", REPLICAS,
    ),
    Mutant(
        "forward-drops-gradients", RUNTIME,
        "an evaluation loses the gradients of sharded parameters",
        "gradients = Gradients(list(dict.fromkeys(parameters)), is_step",
        "gradients = Gradients(list(dict.fromkeys(parameters)) if is_step else [], is_step",
        REPLICAS,
    ),
    Mutant(
        "skip-not-passed-on", ROUTES,
        "a skip does not leave the partitions that it only passes through",
        "if first[key] <= j < last[key]", "if first[key] == j < last[key]", FEATURES,
    ),
    Mutant(
        "seed-of-each-rank", NUMBERS,
        "ranks other than the first forget the agreed seed",
        "self._number = given", "self._number = None", FEATURES,
    ),
]
