"""What the pages of the documentation show does run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ["balance", "batchnorm", "skips"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    file = DOCS / f"{page}.md"
    blocks = re.findall(r"^```python\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(file), "exec"), names)


def test_each_page_with_code_is_run() -> None:
    with_code = {file.stem for file in DOCS.glob("*.md") if "```python" in file.read_text()}
    assert with_code == set(PAGES)
