"""Tests the GPT example: it learns, saves, resumes exactly, and refuses wrong options."""

from __future__ import annotations

import re
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
def test_the_output_ends_with_both_losses_and_how_to_continue(
    example: ModuleType, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    example.main([*tiny, "--steps", "2"])
    result, advice = capsys.readouterr().out.rstrip().split("\n\n")[-2:]
    last = result.splitlines()[-1]
    assert re.fullmatch(r"held-out loss: \d\.\d\d before, \d\.\d\d after 2 steps", last)
    assert advice == example.GO_ON


def test_the_options_recommended_at_the_end_exist(example: ModuleType) -> None:
    options = set(re.findall(r"--[a-z-]+", example.GO_ON))
    known = set(example.build_parser()._option_string_actions)
    assert {"--steps", "--save", "--resume", "--devices", "--help"} <= options
    assert options <= known


@pytest.mark.parametrize(
    ("devices", "threads"), [("cpu,cpu", 4), ("cpu,cpu,cpu", 2), ("cpu", 6), ("cuda:0,cuda:1", 6)]
)
def test_cpu_workers_share_the_cores(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, devices: str, threads: int
) -> None:
    counts = [6]
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("torch.get_num_threads", lambda: counts[-1])
    monkeypatch.setattr("torch.set_num_threads", counts.append)
    example.share_cores(example.devices(devices))
    assert counts[-1] == threads


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


@pytest.mark.slow
def test_resuming_with_another_model_shape_is_refused(
    example: ModuleType, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "gpt.pt")
    example.main([*tiny, "--steps", "1", "--save", file])
    with pytest.raises(SystemExit):
        example.main([*CPU, "--resume", file, "--width", "32"])
    assert "--resume fixes the model to {'context': 16, 'width': 16," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--balance 3,3", "[3, 3] adds up to 6 and the module has 4"),
        ("--balance 1,1,2", "name 3 devices"),
        ("--balance two", "argument --balance: invalid integers value: 'two'"),
        ("--devices cpu,toaster", "argument --devices: 'cpu,toaster' must be like cpu,cpu"),
        ("--heads 3", "heads must divide width"),
        ("--dropout 1", "dropout must be from 0 to below 1, not 1.0"),
        ("--lr 0", "--lr and --temperature must be above 0"),
        ("--chunks 0", "argument --chunks: must be 1 or more, not 0"),
        ("--checkpoint sometimes", "argument --checkpoint: invalid choice: 'sometimes'"),
        ("--context 600", "the text is too short: a tenth of it is held out, so --context 600"),
        ("--save no/such/folder/gpt.pt", "--save needs a folder that exists"),
        ("--data no/such/text.txt", "No such file"),
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


def test_the_text_is_the_standard_library_by_default(example: ModuleType) -> None:
    text = example.read_text(None)
    assert b"class ArgumentParser(" in text
    assert text == example.read_text(None)
