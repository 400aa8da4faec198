"""Tests the trace for Perfetto and the picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pipert
from pipert import Event, Timeline
from pipert.__main__ import main

ROOT = Path(__file__).parents[2]

CUDA = [torch.device("cuda", k) for k in range(2)]

EVENTS = [
    Event("forward", 0, 0, CUDA[0], 0.0, 1.0),
    Event("copy", 0, 1, CUDA[1], 1.0, 1.25, source=CUDA[0], origin=0, bytes=8),
    Event("forward", 0, 1, CUDA[1], 1.5, 2.0),
    Event("backward", 0, 1, CUDA[1], 2.0, 3.0),
    Event("copy", 0, 0, CUDA[0], 3.0, 3.5, source=CUDA[1], origin=1, bytes=8),
    Event("recomputation", 0, 0, CUDA[0], 3.0, 3.25),
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
    kinds = [f">{kind}<" for kind in ("forward", "recomputation", "weight gradient", "copy")]
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


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pipert {pipert.__version__}\n"
