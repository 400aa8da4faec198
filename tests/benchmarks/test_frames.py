"""An action costs no more Python calls, and its layers no more frames, than the engine promises."""

from __future__ import annotations

import frames
import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="thread-local objects cost calls of Python"
)


@pytest.mark.parametrize(("way", "checkpoint", "kind"), frames.BARS)
def test_an_action_stays_within_its_calls_and_frames(way: str, checkpoint: str, kind: str) -> None:
    counted = frames.count(way, checkpoint)[kind]
    calls, most_frames = frames.BARS[way, checkpoint, kind]
    assert counted.calls <= calls
    assert counted.frames is not None and counted.frames <= most_frames


@pytest.mark.parametrize("way", frames.MINI_BATCHES)
def test_a_mini_batch_stays_within_its_calls_and_files(way: str) -> None:
    calls, files = frames.count_mini_batch(way)
    most_calls, most_files = frames.MINI_BATCHES[way]
    assert calls <= most_calls and files <= most_files


def test_each_kind_of_action_of_a_step_is_counted() -> None:
    counted = frames.count("1f1b", "always")
    assert sorted(counted) == ["B", "F", "R"]
    assert counted["B"].frames is None and counted["R"].frames is not None


def test_python_calls_of_the_layers_are_counted() -> None:
    """So the counts include the layers, not the engine alone."""
    plain = frames.count("call", "never")["F"]
    assert frames.count("call", "always")["F"].calls > plain.calls > plain.files > 1
