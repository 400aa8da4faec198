"""Tests the trace for Perfetto, the picture, and the command that makes both for any script."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pipert
from pipert import Event, Timeline
from pipert.__main__ import main
from tests import scripts

ROOT = Path(__file__).parents[2]

CUDA = [torch.device("cuda", k) for k in range(2)]

EVENTS = [
    Event("forward", 0, 0, CUDA[0], 0.0, 1.0),
    Event("copy", 0, 1, CUDA[1], 1.0, 1.25, source=CUDA[0], origin=0, bytes=8),
    Event("forward", 0, 1, CUDA[1], 1.5, 2.0),
    Event("backward", 0, 1, CUDA[1], 2.0, 3.0),
    Event("copy", 0, 0, CUDA[0], 3.0, 3.5, source=CUDA[1], origin=1, bytes=8),
    Event("recompute", 0, 0, CUDA[0], 3.0, 3.25),
    Event("weight gradient", 0, 1, CUDA[1], 3.0, 3.75),
    Event("backward", 0, 0, CUDA[0], 3.5, 4.5),
]


def saved(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    timeline.save(path)
    records: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return records


def test_each_event_is_a_box_of_its_length(tmp_path: Path) -> None:
    records = saved(Timeline(EVENTS, CUDA), tmp_path / "trace.json")
    boxes = [(r["name"], r["ts"], r["dur"], r["cat"]) for r in records if r["ph"] == "X"]
    expected = [(e.name, 1e6 * e.start, 1e6 * e.seconds, e.kind) for e in EVENTS]
    assert sorted(boxes) == sorted(expected)
    args = [r["args"] for r in records if r["ph"] == "X"]
    assert [(a["micro_batch"], a["partition"]) for a in args] == [
        (e.micro_batch, e.partition) for e in EVENTS
    ]


def test_each_device_has_a_lane_for_what_it_computes_and_one_for_its_copies(tmp_path: Path) -> None:
    records = saved(Timeline(EVENTS, CUDA), tmp_path / "trace.json")
    names = {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert set(names.values()) == {"cuda:0", "cuda:0 copies", "cuda:1", "cuda:1 copies"}
    lanes = {(r["name"], names[r["tid"]]) for r in records if r["ph"] == "X"}
    assert lanes == {
        ("F[0,0]", "cuda:0"), ("F[0,1]", "cuda:1"), ("R[0,0]", "cuda:0"), ("B[0,1]", "cuda:1"),
        ("B[0,0]", "cuda:0"), ("W[0,1]", "cuda:1"), ("copy 0: 0 to 1", "cuda:1 copies"),
        ("copy 0: 1 to 0", "cuda:0 copies"),
    }  # fmt: skip


def test_boxes_of_one_thread_do_not_overlap(tmp_path: Path) -> None:
    # Two callers go backward at once; and starts and ends that rounding could push into each other.
    events = [Event("forward", i, 0, CUDA[0], i / 7, (i + 1) / 7) for i in range(50)]
    events += [Event("backward", 0, 0, CUDA[0], 10.0, 12.0, run=run) for run in range(3)]
    records = saved(Timeline(events, CUDA[:1]), tmp_path / "trace.json")
    threads: dict[int, list[tuple[float, float]]] = {}
    for record in records:
        if record["ph"] == "X":
            end = round(record["ts"] + record["dur"], 3)
            threads.setdefault(record["tid"], []).append((record["ts"], end))
    assert len(threads) == 3
    for boxes in threads.values():
        boxes.sort()
        assert all(one[1] <= after[0] for one, after in zip(boxes, boxes[1:], strict=False))


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra 'plot'"
)


@needs_matplotlib
@pytest.mark.slow
@pytest.mark.parametrize(
    "suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_picture_is_of_the_format_that_its_name_says(
    tmp_path: Path, suffix: str, start: bytes
) -> None:
    path = tmp_path / f"timeline.{suffix}"
    Timeline(EVENTS, CUDA).plot(path, "One step")
    assert path.read_bytes().startswith(start)


@needs_matplotlib
@pytest.mark.slow
def test_a_picture_shows_lanes_micro_batches_kinds_and_the_title(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    Timeline(EVENTS, CUDA).plot(path, "One step")
    text = path.read_text()
    kinds = [f">{kind}<" for kind in ("forward", "recompute", "weight gradient", "copy")]
    for word in (">One step<", ">cuda:0<", ">cuda:1<", *kinds, ">0<"):
        assert word in text
    assert ">wait<" not in text


@needs_matplotlib
@pytest.mark.slow
def test_the_same_timeline_gives_the_same_picture(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.svg" for k in range(2)]
    for path in paths:
        Timeline(EVENTS, CUDA).plot(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_picture_without_matplotlib_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib"):
        Timeline(EVENTS, CUDA).plot(tmp_path / "timeline.svg")


SCRIPT = """
import sys
import torch
from torch import nn
from pipert import Pipe

if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = Pipe(module, [1, 1], devices=["cpu", "cpu"], chunks=2)
        for _ in range(5):
            pipe(torch.ones(2, 4)).sum().backward()
    print("done", sys.argv)
    sys.exit(3)
"""


def run_traced(
    folder: Path,
    *options: str,
    what: Sequence[str] = ("script.py",),
    pipes: int = 1,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """``python -m pipert trace``."""
    (folder / "script.py").write_text(SCRIPT)
    arguments = ["trace", *options, *what, str(pipes), "--own", "option"]
    script = f"""
import os, runpy, sys, warnings
os.chdir({str(folder)!r})
warnings.simplefilter("ignore")
sys.path[0] = os.getcwd()
sys.argv[1:] = {arguments!r}
runpy.run_module("pipert", run_name="__main__", alter_sys=True)
"""
    if not fresh:
        return scripts.run(script)
    command = [sys.executable, "-W", "ignore", "-m", "pipert", *arguments]
    paths = [str(Path(pipert.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_traced_module_finds_its_package_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "beside.py").write_text("HERE = 'beside'\n")
    own = "from .beside import HERE\nprint(HERE, __name__, __spec__.name)"
    (tmp_path / "package" / "training.py").write_text(f"{own}\n{SCRIPT}")
    ended = run_traced(tmp_path, "--out", "here.json", what=["-m", "package.training"], fresh=True)
    assert ended.returncode == 3
    there = tmp_path / "package" / "training.py"
    assert "beside __main__ package.training" in ended.stdout
    assert f"done ['{there}', '1', '--own', 'option']" in ended.stdout
    assert runs_in(tmp_path / "here.json") == {2, 3, 4}


def runs_in(path: Path) -> set[int]:
    records = json.loads(path.read_text())["traceEvents"]
    return {record["args"]["run"] for record in records if record["ph"] == "X"}


@pytest.mark.slow
def test_a_script_is_traced_without_a_change_and_ends_as_it_does(tmp_path: Path) -> None:
    ended = run_traced(tmp_path, fresh=True)
    assert ended.returncode == 3
    assert "done ['script.py', '1', '--own', 'option']" in ended.stdout
    assert "Bubble:" in ended.stderr
    assert runs_in(tmp_path / "trace.json") == {2, 3, 4}


@pytest.mark.slow
def test_calls_are_skipped_and_counted_with_their_backwards(tmp_path: Path) -> None:
    run_traced(tmp_path, "--skip", "1", "--calls", "2", "--out", "here.json")
    assert runs_in(tmp_path / "here.json") == {1, 2}
    records = json.loads((tmp_path / "here.json").read_text())["traceEvents"]
    backwards = [r for r in records if r.get("cat") == "backward" and r["args"]["run"] == 2]
    assert {r["name"] for r in backwards} == {"B[0,0]", "B[0,1]", "B[1,0]", "B[1,1]"}


@pytest.mark.slow
def test_each_pipe_has_a_trace_of_its_own(tmp_path: Path) -> None:
    run_traced(tmp_path, "--skip", "0", "--calls", "9", pipes=2)
    assert runs_in(tmp_path / "trace.json") == runs_in(tmp_path / "trace-1.json") == set(range(5))


@pytest.mark.slow
def test_a_script_that_calls_too_little_is_told_so(tmp_path: Path) -> None:
    ended = run_traced(tmp_path, "--skip", "5")
    assert "no call was recorded; pipes made: 1" in ended.stderr
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "status", "told"), [
    (["train.py"], 2, "there is no file train.py; for a module, write -m train.py"),
    (["-m", "train"], 2, "there is no module train; for a file, leave out -m"),
    (["empty.py"], 1, "no call was recorded; the script made no Pipe and no pipert.pipeline"),
])  # fmt: skip
def test_a_script_that_is_not_there_or_has_no_pipe_is_told_so(
    tmp_path: Path, what: list[str], status: int, told: str
) -> None:
    (tmp_path / "empty.py").write_text("")
    ended = run_traced(tmp_path, what=what)
    assert ended.returncode == status and told in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("skip", "end", "status"), [(5, "0", 1), (5, "None", 1), (2, "0", 0)])
def test_a_script_that_succeeds_unrecorded_does_not_end_with_success(
    tmp_path: Path, skip: int, end: str, status: int
) -> None:
    (tmp_path / "ends.py").write_text(SCRIPT.replace("sys.exit(3)", f"sys.exit({end})"))
    assert run_traced(tmp_path, "--skip", str(skip), what=["ends.py"]).returncode == status


@pytest.mark.slow
def test_what_a_thread_records_that_the_script_leaves_behind_counts(tmp_path: Path) -> None:
    called = SCRIPT.replace("sys.exit(3)", "").replace('if __name__ == "__main__":', "def main():")
    thread = "import threading\nthreading.Thread(target=main).start()\n"
    (tmp_path / "leaves.py").write_text(called + thread)
    ended = run_traced(tmp_path, what=["leaves.py"])
    assert ended.returncode == 0 and runs_in(tmp_path / "trace.json") == {2, 3, 4}


def test_git_ignores_what_trace_leaves_here() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    names = ["trace.json", "trace-1.json", "trace-rank0.json", "timeline.svg", "timeline-1.svg"]
    ignored = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True)
    assert ignored.stdout.decode().split() == names


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pipert {pipert.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--calls", "0"], ["--skip", "-1"], ["--out", "nowhere/trace.json"], ["--out", "."],
        ["--plot", "picture.xyz"],
    ],
)  # fmt: skip
def test_impossible_options_are_refused_before_the_script_runs(
    tmp_path: Path, options: list[str]
) -> None:
    ended = run_traced(tmp_path, *options)
    assert ended.returncode == 2 and "done" not in ended.stdout
    assert f"error: {options[0]} must" in ended.stderr or "--skip must" in ended.stderr
