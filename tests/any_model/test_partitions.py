"""Tests where layers run: equal results alone could also come from one partition."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from pipert.layers.intercepted import current_thread
from tests.any_model.all_families import each_family
from tests.any_model.family import Family
from tests.any_model.piped import HOWS, made, step


@each_family
def test_a_partition_begins_with_the_first_call_of_its_cut(family: Family) -> None:
    """In each micro-batch the previous partition runs before it, and no earlier one after it."""
    model, batch = copy.deepcopy(made(family))
    found: dict[Any, list[tuple[str, int]]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            microbatch: Any = current_thread.interceptor
            if microbatch is None:  # it is computed again, by itself
                return
            found.setdefault(microbatch.i, []).append((name, microbatch.j))

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(note(name))
    step(model, batch, family, HOWS[3])
    assert sorted(found) == [0, 1, 2, 3]
    for calls in found.values():
        current = 0
        for name, j in calls:
            if current < len(family.cuts) and name == family.cuts[current]:
                current += 1
            assert j == current, name
        assert current == len(family.cuts)
