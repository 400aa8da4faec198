"""What the pages of the documentation show does run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    "balance", "batchnorm", "embedding", "running_for_weeks", "several_machines", "skips",
    "when_it_fails",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    file = DOCS / f"{page}.md"
    text = file.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        # On the lines where they stand, so that tracebacks show them.
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], str(file), "exec"), names)


def test_each_page_with_code_is_run() -> None:
    with_code = {file.stem for file in DOCS.glob("*.md") if "```python" in file.read_text()}
    assert with_code == set(PAGES)
