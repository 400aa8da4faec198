"""Lists breakages of a pipe over several processes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BREAKAGES"]

ROOM = "pipert/distributed/"
BOUNDARY, GRADIENTS = f"{ROOM}rank_boundary.py", f"{ROOM}rank_gradients.py"
PARTITION, AGREEMENT, RUN = (f"{ROOM}rank_{name}.py" for name in ("partition", "agreement", "run"))
ROUTES, NUMBERS = "pipert/skip/routes.py", "pipert/layers/random_numbers.py"
EQUALITY = ("tests/distributed/test_equality.py",)
FEATURES = ("tests/distributed/test_features.py",)
FAULTS = ("tests/distributed/test_rank_faults.py",)
REPLICAS = ("tests/distributed/test_data_parallel.py",)

BREAKAGES = [
    Mutant(
        "strides-of-the-receiver", BOUNDARY,
        "the bytes of a tensor in another order are read in the receiver's order",
        "if tensor.stride() == like.stride() and not", "if not",
        ("tests/distributed/test_rank_boundary.py",),
    ),
    Mutant(
        "tied-gradient-of-one-rank", GRADIENTS,
        "a rank's copy of a shared parameter gets only this rank's gradient",
        "        parameter.grad = total", "        pass", FEATURES,
    ),
    Mutant(
        "accumulated-gradient-dropped", GRADIENTS,
        "a parameter's gradient from before the mini-batch is lost",
        "before.add_(new)", "new", EQUALITY,
    ),
    Mutant(
        "split-where-weights-are-lost", f"{ROOM}split_backward.py",
        "if B is split, weights that no input leads to get no gradient, or a part of it",
        "return root in between and len(once) == len(beside)", "return True",
        ("tests/distributed/test_split_backward.py",),
    ),
    Mutant(
        "change-of-one-of-two-views", PARTITION,
        "a tensor that shared memory with another is changed in place, and the other does not "
        "change",
        "if arrived is not None and arrived.shared:", "if False:", FAULTS,
    ),
    Mutant(
        "another-call-taken-for-this", AGREEMENT,
        "a rank that alone calls grad_norm() seems to begin the other ranks' mini-batch",
        'self.require_same("call", [begun for begun, _, _ in reports])', "pass", FAULTS,
    ),
    Mutant(
        "arriving-leaf-changed-in-place", PARTITION,
        "a first layer that works in place gets the received leaf",
        "return rebuild(order.join(order.ENTRANCE, *xs)) if xs else x", "return x", FEATURES,
    ),
    Mutant(
        "consequence-told", AGREEMENT,
        "a rank that fails because another failed to send raises its own error",
        "and failure[0] == first", "", FAULTS,
    ),
    Mutant(
        "group-of-30-minutes", AGREEMENT,
        "ranks wait for one that does not answer as long as torch's groups do by default",
        "world.get_group_store().timeout", "None", FAULTS,
    ),
    Mutant(
        "gradient-in-the-bucket", GRADIENTS,
        "a gradient put aside is memory of a DDP bucket, which the mini-batch overwrites",
        "dx.clone() if are_views and dx is not None else dx", "dx", REPLICAS,
    ),
    Mutant(
        "evaluation-stays-gathered", RUN,
        "an evaluation leaves parameters gathered, without their gradients",
        "part.reshard()", "pass", ("tests/distributed/test_sharded_weights.py",),
    ),
    Mutant(
        "skip-not-passed-on", ROUTES,
        "a skip does not leave the partitions that it only passes through",
        "if first[key] <= j < last[key]", "if first[key] == j < last[key]", FEATURES,
    ),
    Mutant(
        "seed-of-each-rank", NUMBERS,
        "ranks other than the first forget the agreed seed",
        "self._given = given", "self._given = None", FEATURES,
    ),
]
