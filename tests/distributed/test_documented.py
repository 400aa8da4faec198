"""Tests the code of docs/several_machines.md on several ranks (test_docs.py: on one)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.launcher import run

PAGE = Path(__file__).parents[2] / "docs" / "several_machines.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def follow(rank: int, folder: Path, copies: int) -> tuple[float, float]:
    """What the page does; a loss at its end, and the norm of the gradients."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for call in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, call, lambda *args, **kwargs: None)
        for block in BLOCKS:
            text = block.replace("copies = 1 ", f"copies = {copies} ")
            exec(compile(text, str(PAGE), "exec"), names)
        assert copies == 1 or "copies = 1 " in "".join(BLOCKS)
        pipe, loss_fn = names["pipe"], names["nn"].functional.mse_loss
        pipe.zero_grad()
        loss = pipe.forward_backward(names["x"], target=names["target"], loss_fn=loss_fn)
        return loss.item(), pipe.grad_norm().item()


@pytest.mark.parametrize("ranks, copies", [(2, 1), (4, 2)])
def test_the_page_can_be_followed(tmp_path: Path, ranks: int, copies: int) -> None:
    pytest.importorskip("numpy", reason="torch.distributed.checkpoint needs it")
    found = run(ranks, follow, tmp_path, copies)
    assert all(one == pytest.approx(found[0]) for one in found)
