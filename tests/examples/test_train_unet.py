"""Tests the U-Net example: it denoises, draws a picture, and refuses wrong options."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("tqdm", reason="the example shows its progress with tqdm")
skimage = pytest.importorskip("skimage", reason="the example's photographs are scikit-image's")

TINY = "--balance 33,32 --channels 2 --batch 2 --chunks 2 --steps 2"


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Returns the options of a short run."""
    return [*TINY.split(), "--devices", "cpu,cpu", "--out", str(tmp_path / "unet.png")]


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
def test_the_picture_shows_the_photograph_with_noise_without_and_restored(
    example: ModuleType, small: list[str], tmp_path: Path
) -> None:
    result = example.main(small)
    picture = torch.from_numpy(skimage.io.imread(tmp_path / "unet.png")).permute(2, 0, 1) / 255
    clean = example.photograph(example.HELD_OUT)
    noisy, target, restored = torch.split(picture, clean.shape[2], dim=2)
    for gray in (target, restored):
        assert torch.equal(gray, gray[:1].expand(3, -1, -1))
    expected = example.luminance(clean[None])[0]
    assert (target[:1] - expected).abs().max() < 0.5 / 255 + 1e-6
    assert example.psnr(restored[:1], expected) == pytest.approx(result.denoised, abs=0.5)
    assert 0.1 < (noisy - clean).std() < 0.15  # cut off at black and white


@pytest.mark.slow
def test_the_last_lines_show_the_result_and_the_path_of_the_picture(
    example: ModuleType, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(tiny)
    figures, where = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(r"held-out PSNR: \d+\.\d\d dB noisy, \d+\.\d\d dB denoised", figures)
    assert where.startswith(f"wrote {tmp_path / 'unet.png'}: ") and "in gray" in where


@pytest.mark.slow
def test_the_result_depends_on_the_seed_and_not_on_how_the_work_is_split(
    example: ModuleType, small: list[str]
) -> None:
    first = example.main(small)
    split = example.main([*small, "--balance", "10,55", "--chunks", "1", "--checkpoint", "never"])
    other = example.main([*small, "--seed", "1"])
    assert split.losses == pytest.approx(first.losses, rel=1e-3)
    assert other.losses != pytest.approx(first.losses, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--balance 3,3", "[3, 3] adds up to 6 and the module has 65"),
        ("--balance 22,22,21", "name 3 devices"),
        ("--balance two", "argument --balance: invalid integers value: 'two'"),
        ("--devices cpu,toaster", "argument --devices: 'cpu,toaster' must be like cpu,cpu"),
        ("--channels 3", "channels must be even and 2 or more, not 3"),
        ("--blocks 0", "argument --blocks: must be 1 or more, not 0"),
        ("--size 32", "--size must be from 64 to 400, not 32"),
        ("--size 500", "--size must be from 64 to 400, not 500"),
        ("--lr 0", "--lr and --noise must be above 0"),
        ("--noise -1", "--lr and --noise must be above 0"),
        ("--checkpoint sometimes", "argument --checkpoint: invalid choice: 'sometimes'"),
        ("--out no/such/folder/unet.png", "--out needs a folder that exists"),
        ("--out unet.text", "--out must end in .png, not unet.text"),
    ],
)
def test_a_bad_option_ends_the_program_with_a_clear_message(
    example: ModuleType,
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    with pytest.raises(SystemExit) as end:
        example.main([*tiny, *options.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_training_never_sees_the_photograph_held_out(example: ModuleType) -> None:
    assert example.HELD_OUT not in example.TRAINING
