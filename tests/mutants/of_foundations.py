"""Lists breakages of the foundations: queues, workers, graph nodes, scatter and gather."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BREAKAGES"]

QUEUE, LATCH = "pipert/queues/closable.py", "pipert/queues/latch.py"
LOCK = "pipert/queues/process_lock.py"
POOL = "pipert/workers/pool.py"
CHECKPOINT, ORDER = "pipert/autograd/checkpoint.py", "pipert/autograd/order.py"
BATCH = "pipert/batch/microbatch.py"
JOINING, TREES = "pipert/batch/joining.py", "pipert/batch/trees.py"
STAGE = "pipert/stage/stage.py"

OF_THREADS = [
    Mutant(
        "queue-loses-an-item", QUEUE,
        "an item put while the queue closes is neither received nor returned nor refused (Q1)",
        "if self._closed and cell.take() is not None:", "if False:",
        ("tests/queues/test_closable.py",),
    ),
    Mutant(
        "latch-opens-by-itself", LATCH,
        "a waiter whose time limit for an arrival has passed is told that all have arrived",
        "self._gate.release()\n        return self._open",
        "self._gate.release()\n        return True",
        ("tests/queues/test_latch.py",),
    ),
    Mutant(
        "close-joins-nobody", POOL,
        "`close` returns while threads are still working (P2)",
        "if not join:", "if True:",
        ("tests/workers/test_pool.py",),
    ),
    Mutant(
        "locks-stay-locked-in-a-child", LOCK,
        "a child forked while a thread holds a lock of the process waits for that lock forever "
        "(P5)",
        "os.register_at_fork(after_in_child=self._renew)", "pass",
        ("tests/test_fork.py",),
    ),
]  # fmt: skip

OF_GRAPHS = [
    Mutant(
        "join-ties-nothing", ORDER,
        "the backward of a micro-batch does not wait for that of the next one: the token is "
        "dropped",
        "join = applied(_Join)", "join = lambda token, *xs: xs  # noqa: E731",
        ("tests/autograd/test_order.py",),
    ),
    Mutant(
        "tasks-take-no-turns", ORDER,
        "partitions' contributions to a shared gradient are summed in the order of numbers that "
        "each worker counts separately, which differs from call to call",
        "set_sequence_nr(ctx, turn)", "pass",
        ("tests/contract/test_order_of_sums.py",),
    ),
    Mutant(
        "inputs-changed-unnoticed", "pipert/autograd/recompute.py",
        "an input modified between forward and recomputation is used for the recomputation",
        "if version(tensor) != before:", "if False:",
        ("tests/autograd/test_checkpoint.py",),
    ),
    Mutant(
        "inputs-not-cloned", "pipert/autograd/recompute.py",
        "a checkpointed partition gets the input itself, which a first layer may change in place",
        "given.append(tensor.clone())", "given.append(tensor)",
        ("tests/autograd/test_checkpoint.py",),
    ),
    Mutant(
        "saved-stays", CHECKPOINT,
        "a saved activation that was read lives as long as the graph",
        "self._saved.pop(number)", "self._saved[number]",
        ("tests/autograd/test_checkpoint.py",),
    ),
]  # fmt: skip

OF_BATCHES = [
    Mutant(
        "rest-in-the-last-micro-batch", BATCH,
        "all rows that do not divide evenly go into the last micro-batch",
        "sizes = [batch // m + (i < batch % m) for i in range(m)]",
        "sizes = [batch // m + (batch % m) * (i == m - 1) for i in range(m)]",
        ("tests/test_microbatch.py",),
    ),
    Mutant(
        "gathered-backwards", JOINING,
        "the rows of the last micro-batch come first in the output",
        "return torch.cat(column)", "return torch.cat(column[::-1])",
        ("tests/test_microbatch.py",),
    ),
    Mutant(
        "replicated-is-split", BATCH,
        "a value wrapped in Replicate is split like any other",
        "return [leaf.value] * len(sizes)", "return _split(leaf.value, sizes)",
        ("tests/test_microbatch.py",),
    ),
    Mutant(
        "rows-hidden-deeper-unseen", TREES,
        "rows nested two objects deep go whole to each micro-batch",
        "left += held", "pass",
        ("tests/test_hidden.py",),
    ),
    Mutant(
        "rows-of-outputs-unchecked", JOINING,
        "outputs whose rows are in another dimension are concatenated",
        "if rest or rows !=", "if rest and rows !=",
        ("tests/test_hidden.py",),
    ),
    Mutant(
        "overlap-not-handed-on", STAGE,
        "if a partition only passes on a base and its view, the next partition may change one "
        "without the other",
        "self.run.handed_on[i, self.place.j + 1] = shared", "pass",
        ("tests/contract/test_shared_memory.py",),
    ),
]  # fmt: skip

BREAKAGES = [*OF_THREADS, *OF_GRAPHS, *OF_BATCHES]
