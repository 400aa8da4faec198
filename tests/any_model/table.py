"""Writes the table of models that were tried: ``python -m tests.any_model.table``.

It runs all families in all ways, which takes a minute, and writes down the results.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch import nn

from tests.any_model.all_families import ZOO
from tests.any_model.family import Family
from tests.any_model.piped import CHUNKS, HOWS, How, assert_equal_outputs, found_and_plain, made
from tests.any_model.same import assert_same

__all__ = ["PAGE", "main", "row_of"]

PAGE = Path(__file__).parents[2] / "benchmarks" / "models.md"
HEAD = f"""\
<!-- python -m tests.any_model.table writes this page -->
# Models that were tried

`pipert.pipeline` runs these models unchanged: tiny versions, built from a configuration, with
the versions of `constraints.txt`, in {CHUNKS} micro-batches. Outputs equal the plain model's bit
for bit, by micro-batches, and the gradients of *all* parameters up to the order of sums.

**Equal in** *all* means: a call without checkpointing; one with `checkpoint="always"`; a step by
`gpipe` with `"except_last"`; one by `1f1b`; and a *ragged* one, six rows in {CHUNKS} micro-batches,
by `1f1b` with `"always"`. **Tied** is the number of parameters that belong to several modules.
"""
COLUMNS = ["family", "cut at", "equal in", "tied", "notes"]


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page())


def page() -> str:
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(row_of, ZOO)]
    return "\n".join([HEAD, *map(line, rows)]) + "\n"


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def row_of(family: Family) -> list[str]:
    """Runs a family in all ways; returns its row."""
    cuts = "<br>".join(f"`{cut}`" for cut in family.cuts)
    if family.why_not:
        return [family.name, cuts, "none", "", family.why_not]
    ran = [how for how in HOWS if not (family.whole_rows and how.rows % CHUNKS)]
    equal = [how for how in ran if _outputs(family, how) and _grads(family, how)]
    missing = [how.name for how in HOWS if how not in equal]
    ways = f"all but {', '.join(missing)}" if missing else "all"
    notes = [family.notes, family.mixes_rows, family.whole_rows]
    return [
        family.name, cuts, ways, str(tied(made(family).model) or ""),
        "; ".join(filter(None, notes)),
    ]  # fmt: skip


def _outputs(family: Family, how: How) -> bool:
    found, plain = found_and_plain(family, how)
    try:
        assert_equal_outputs(found.output, plain.output)
    except AssertionError:
        return False
    return True


def _grads(family: Family, how: How) -> bool:
    found, plain = found_and_plain(family, how)
    try:
        assert_same(found.grads, plain.grads)
    except AssertionError:
        return False
    return True


def tied(model: nn.Module) -> int:
    """Counts the parameters that belong to several modules."""
    modules = dict(model.named_modules())  # a module with two names only once
    found = [p for module in modules.values() for p in module.parameters(recurse=False)]
    return sum(count > 1 for count in Counter(map(id, found)).values())


if __name__ == "__main__":
    main()
