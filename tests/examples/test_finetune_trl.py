"""Tests the example of trl's trainers: both trainings learn, each step in a pipe."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("trl", reason="its trainers are used")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_sft_and_dpo_learn_in_pipes(
    example: ModuleType, two_devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes: list[Any] = []
    put_in_pipe = example.put_in_pipe

    def noted(*args: Any) -> Any:
        pipes.append(put_in_pipe(*args))
        return pipes[-1]

    monkeypatch.setattr(example, "put_in_pipe", noted)
    options = "--steps 15 --layers 2 --every 200 --lr 0.005".split()
    sft, dpo = example.main([*options, "--devices", two_devices])
    assert sft[-1] < sft[0] - 0.5
    assert dpo[0] == pytest.approx(math.log(2), abs=0.1) and dpo[-1] < dpo[0] - 0.05
    trained, preferring, reference = [pipe.statistics().runs for pipe in pipes]
    assert trained == preferring == 15  # one step each, of four micro-batches
    assert reference >= 15
