"""Tests the example that fine-tunes a model which is nowhere as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the example fine-tunes its model")
pytest.importorskip("accelerate", reason="it spreads the shards")
import finetune_large  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

pytestmark = pytest.mark.slow


def test_it_learns_and_the_saved_model_goes_on(tmp_path: Path) -> None:
    small = ["--width", "32", "--layers", "4", "--rows", "8", "--devices", "cpu,cpu"]
    result = finetune_large.main([*small, "--steps", "20", "--save", str(tmp_path)])
    assert result.last < result.first - 0.3
    again = finetune_large.main([*small, "--steps", "1", "--folder", str(tmp_path)])
    assert again.first < result.first - 0.3
    assert not any(p.is_meta for p in LlamaForCausalLM.from_pretrained(tmp_path).parameters())
    assert torch.is_grad_enabled()
