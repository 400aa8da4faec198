"""Tests the fine-tuning example: it learns, and the plain model loads what it saves."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers", reason="the example trains a model of it")
pytest.importorskip("peft", reason="the example's adapters are from it")

pytestmark = pytest.mark.slow

SENTENCE = b"the pipeline is full when every worker has a task."
TEXT = b"\n\n".join(SENTENCE[k % 9 :] for k in range(99))
TINY = "--width 16 --layers 2 --microbatches 2 --rank 2 --steps 12 --lr 0.03".split()


@pytest.fixture
def tiny(tmp_path: Path, two_devices: str) -> list[str]:
    """Returns the options of a short run."""
    data = tmp_path / "text.txt"
    data.write_bytes(TEXT)
    return [*TINY, "--data", str(data), "--devices", two_devices]


@pytest.mark.usefixtures("one_measurement")
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.sweep)])
def test_training_lowers_the_held_out_loss(
    example: ModuleType, tiny: list[str], schedule: str
) -> None:
    result = example.main([*tiny, "--schedule", schedule])
    assert result.after < result.before - 0.5


@pytest.mark.usefixtures("one_measurement")
def test_the_adapters_are_saved_and_the_plain_model_loads_them(
    example: ModuleType, tiny: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    result = example.main([*tiny, "--save", str(folder)])
    assert result.difference < 1e-4
    assert (folder / "adapter_model.safetensors").exists()
