"""Tests the GPT example: it learns, saves, resumes exactly, and refuses wrong options."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

TEXT = b"the pipeline is full when every worker has a task. " * 100
CPU = ["--devices", "cpu,cpu", "--sample", "0"]
MODEL = "--context 16 --width 16 --layers 2 --heads 2 --batch 8 --chunks 2 --warmup 2 --lr 0.01"

pytest.importorskip("tqdm", reason="the example shows its progress with tqdm")


@pytest.fixture
def shape(tmp_path: Path) -> list[str]:
    """Returns the options of a small model."""
    data = tmp_path / "text.txt"
    data.write_bytes(TEXT)
    return [*MODEL.split(), "--data", str(data)]


@pytest.fixture
def where(two_devices: str) -> list[str]:
    return ["--devices", two_devices, "--sample", "0"]


@pytest.fixture
def small(shape: list[str], where: list[str]) -> list[str]:
    """Returns the options of a short run, on CPU and on GPUs."""
    return [*shape, *where]


@pytest.fixture
def tiny(shape: list[str]) -> list[str]:
    """Returns the options of a short run on CPU."""
    return [*shape, *CPU]


@pytest.mark.slow
def test_training_lowers_the_held_out_loss(example: ModuleType, small: list[str]) -> None:
    result = example.main([*small, "--steps", "20"])
    assert result.steps == 20
    assert result.after < result.before - 1


@pytest.mark.slow
def test_the_saved_model_loads_into_the_plain_sequential(
    example: ModuleType, small: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "gpt.pt"
    result = example.main([*small, "--steps", "2", "--save", str(file)])
    state = torch.load(file, weights_only=True)
    model = example.build_model(example.ModelConfig(**state["config"])).eval()
    model.load_state_dict(state["trainer"]["model"], strict=True)
    held_out = example.split_text(TEXT, context=16)[1].long()
    starts = torch.linspace(0, len(held_out) - 17, example.HELD_OUT_WINDOWS).long()
    windows = example.cut_windows(held_out, starts, 16)
    with torch.no_grad():
        logits = model(windows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss.item() == pytest.approx(result.after)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["0.0", "0.2"])
def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(
    example: ModuleType, small: list[str], where: list[str], tmp_path: Path, dropout: str
) -> None:
    whole, part, rest = (str(tmp_path / name) for name in ("whole.pt", "part.pt", "rest.pt"))
    run = [*small, "--steps", "6", "--dropout", dropout]
    uninterrupted = example.main([*run, "--save", whole])
    stopped = example.main([*run, "--save", part, "--stop-at", "3"])
    torch.manual_seed(99)  # another process would stand elsewhere
    resumed = example.main([*where, "--resume", part, "--save", rest])
    assert stopped.steps == 3
    assert resumed == uninterrupted
    expected = torch.load(whole, weights_only=True)["trainer"]["model"]
    actual = torch.load(rest, weights_only=True)["trainer"]["model"]
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--balance 3,3", "[3, 3] adds up to 6 and the module has 4"),
        ("--balance 1,1,2", "name 3 devices"),
        ("--devices cpu,toaster", "argument --devices: 'cpu,toaster' must be like cpu,cpu"),
        ("--chunks 0", "argument --chunks: must be 1 or more, not 0"),
        ("--context 600", "the text is too short: a tenth of it is held out, so --context 600"),
        ("--save no/such/folder/gpt.pt", "--save needs a folder that exists"),
        ("--resume train_gpt.py", "is not a file that --save wrote"),
    ],
)
def test_a_bad_option_ends_the_program_with_a_clear_message(
    example: ModuleType,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    monkeypatch.chdir(Path(str(example.__file__)).parent)
    with pytest.raises(SystemExit) as end:
        example.main([*tiny, *options.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
