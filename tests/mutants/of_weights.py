"""Lists breakages of gradients that a schedule puts off, and of what predicts a step."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BREAKAGES"]

USES, GRADIENTS = "pipert/autograd/weight_uses.py", "pipert/autograd/weight_gradients.py"
PUT_OFF, STEPS = "tests/step/test_put_off_weights.py", "tests/step/test_weight_gradients.py"

BREAKAGES = [
    Mutant(
        "weight-with-other-uses", USES,
        "a weight is put off though it is also used by an operation that is not known",
        "if of_weights[id(use.weight.leaf)] == total[id(use.weight.leaf)]]", "]",
        (STEPS,),
    ),
    Mutant(
        "hooks-of-nodes-overlooked", USES,
        "a weight is put off though a hook of the node sees its gradient, or changes it",
        "        if hooks:\n            return False", "        pass",
        (PUT_OFF,),
    ),
    Mutant(
        "frozen-weights-overlooked", GRADIENTS,
        "a weight that was frozen after its backward still gets a gradient",
        "if leaf.requires_grad:  # not frozen since", "if True:",
        (PUT_OFF, STEPS),
    ),
    Mutant(
        "changes-overlooked", GRADIENTS,
        "a tensor that was changed between B and W makes a wrong gradient",
        "if version(self.tensor) != self.version:", "if False:",
        (PUT_OFF, STEPS),
    ),
    Mutant(
        "backward-within-the-backward", GRADIENTS,
        "what arrives at a node in a backward that a hook runs counts for B, too",
        "dy = self._seen[number] if number in self._seen else",
        "dy = [*self._seen.values()][-1] if self._seen else",
        (PUT_OFF,),
    ),
    Mutant(
        "put-off-tensors-kept", GRADIENTS,
        "W frees what it needs only when it is over, and not weight by weight",
        "    later.reverse()\n", "    later = [*reversed(later)]\n",
        (PUT_OFF,),
    ),
    Mutant(
        "larger-gradients-kept", GRADIENTS,
        "a gradient that is kept for W keeps the larger one of which it is a part",
        "    tensor = alone(tensor)\n    return _Kept", "    return _Kept",
        (PUT_OFF,),
    ),
    Mutant(
        "room-of-a-schedule", "pipert/schedules/greedy.py",
        "a schedule keeps more micro-batches than it says",
        "self._kept[worker] < self._room[worker] - later",
        "self._kept[worker] <= self._room[worker] - later",
        (STEPS, "tests/schedules/test_zero_bubble.py"),
    ),
]
