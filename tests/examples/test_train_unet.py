"""Tests the U-Net example: it denoises, draws a picture, and refuses wrong options."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("tqdm", reason="the example shows its progress with tqdm")
pytest.importorskip("skimage", reason="the example's photographs are scikit-image's")

TINY = "--balance 33,32 --channels 2 --batch 2 --chunks 2 --steps 2"


@pytest.fixture
def small(tmp_path: Path, two_devices: str) -> list[str]:
    """Returns the options of a short run, on CPU and on GPUs."""
    return [*TINY.split(), "--devices", two_devices, "--out", str(tmp_path / "unet.png")]


@pytest.mark.slow
def test_training_takes_noise_out_of_a_photograph_not_seen(
    example: ModuleType, small: list[str]
) -> None:
    result = example.main([*small, "--channels", "4", "--steps", "40"])
    assert result.denoised > result.noisy + 3
    assert sum(result.losses[-10:]) < sum(result.losses[:10]) / 2


@pytest.mark.slow
def test_the_result_depends_on_the_seed_and_not_on_how_the_work_is_split(
    example: ModuleType, small: list[str]
) -> None:
    first = example.main(small)
    split = example.main([*small, "--balance", "10,55", "--chunks", "1", "--checkpoint", "never"])
    other = example.main([*small, "--seed", "1"])
    assert split.losses == pytest.approx(first.losses, rel=1e-3)
    assert other.losses != pytest.approx(first.losses, rel=1e-3)
