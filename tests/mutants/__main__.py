"""``python -m tests.mutants`` tries one mutant after the other, and shows which test notices."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.places import NOT_NOTICED, ROOT, mutants

MADE_FOR_THEM = (
    "tests/cuda/test_waits.py", "tests/cuda/test_waits_for_skips.py",
    "tests/cuda/test_copies_overlap.py", "tests/cuda/test_written_after_use.py",
    "tests/cuda/test_read_on_other_streams.py", "tests/cuda/test_streams_are_put_back.py",
    "tests/cuda/test_random_on_cuda.py", "tests/any_model/test_on_gpus.py",
)  # fmt: skip
"""The tests made for mutants, which notice most of them within seconds."""
STAGES = (MADE_FOR_THEM, ("tests/cuda", "tests/any_model", "tests/recording"), ("tests",))
SECONDS = 3600.0  # for all tests on a busy core; more is a hang


class Verdict(NamedTuple):
    """The first test that failed, if any, and its message."""

    failed: str
    message: str


class Tree:
    """A copy of the repository, without the tests of the mutants, which would notice every one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        left_out = shutil.ignore_patterns(".*", "__pycache__", "mutants", "*.egg-info")
        shutil.copytree(ROOT, root, ignore=left_out, dirs_exist_ok=True)

    def write(self, file: str, text: str) -> None:
        (self._root / file).write_text(text)

    def restore(self, file: str) -> None:
        shutil.copy2(ROOT / file, self._root / file)

    def run(self, *tests: str) -> Verdict:
        """Runs tests on simulated GPUs until one fails."""
        command = [
            sys.executable, "-B", "-m", "pytest", "--simulated-gpus", "--sweep", "-x", "-q",
            "-p", "no:cacheprovider", *tests,
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(self._root)}
        try:
            done = subprocess.run(
                command, cwd=self._root, env=environment, capture_output=True, text=True,
                timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Verdict("-", "no end")
        if done.returncode in (0, 5):  # 5: no tests were collected
            return Verdict("", "")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py\S*)(.*)$", done.stdout, re.MULTILINE)
        if failed is None:  # such as a hang, which ends the process
            return Verdict("-", (done.stdout + done.stderr).strip().rpartition("\n")[2])
        if "::" not in failed[1]:
            raise RuntimeError(f"tests that cannot be imported notice nothing:\n{done.stdout}")
        return Verdict(failed[1], failed[2].removeprefix(" - "))


def first_to_notice(tree: Tree, file: str, text: str, stages: Sequence[Sequence[str]]) -> Verdict:
    """Returns the first test that fails with the mutant, fails again alone, and not without it."""
    for tests in stages:
        passed_over: list[str] = []
        while True:
            tree.write(file, text)
            found = tree.run(*[f"--deselect={test}" for test in passed_over], *tests)
            if not found.failed:
                break
            if found.failed == "-":
                return found
            again = tree.run(found.failed)
            tree.restore(file)
            if again.failed and not tree.run(found.failed).failed:
                return found
            passed_over.append(found.failed)
    return Verdict("", "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the mutants and prints a row for each; returns 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="only those whose name has this text")
    parser.add_argument("--list", action="store_true", help="print them, and try none")
    parser.add_argument("--stages", type=int, default=3, choices=(1, 2, 3),
                        help="1: the tests made for mutants; 2: others that look at streams; "
                        "3: all tests (default)")  # fmt: skip
    options = parser.parse_args(arguments)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="pipert-mutants-") as folder:
        tree = None if options.list else Tree(Path(folder))
        for mutant in mutants():
            if options.only not in mutant.name or mutant.name in NOT_NOTICED:
                continue
            row = f"{mutant.name}: {mutant.call} -> {mutant.instead}"
            if tree is None:
                print(row)
                continue
            stages = STAGES[: options.stages]
            found = first_to_notice(tree, mutant.file, mutant.mutated(), stages)
            tree.restore(mutant.file)
            print(f"{row}: {found.failed or 'NOBODY NOTICES'} {found.message}", flush=True)
            survivors += [mutant.name] if not found.failed else []
    print(*[f"survives: {name}" for name in survivors], sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
