"""Finds the calls of the package that order work on GPUs, and changes one of them.

A place is found by the name of what it calls, in the syntax tree. So a change of the package needs
no change here: a new wait has its mutant at once, and one that has moved keeps it.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["NOT_NOTICED", "ROOT", "Mutant", "mutants"]

ROOT = Path(__file__).parents[2]
ONLY_TIMES = ("pipert/observe/", "pipert/check", "pipert/demo")
"""Files whose streams and events order nothing in a run: they measure, or check from outside."""

DROPPED = {
    "wait_stream", "wait_event", "record_stream", "set_stream", "set_device", "_set_streams",
    "let_others_copy", "follow_the_caller", "return_what_was_read", "_let_autograd_read",
}  # fmt: skip
"""Statements that are left out."""
CONTEXTS = {"stream", "device", "current_streams"}
"""Contexts that are replaced by one that does nothing; other methods of these names are below."""
RECEIVERS = {
    "wait": {"", "streams", "transfer", "transport", "_transport"},
    "copy": {"streams", "transfer", "transport", "_transport"},
    "get": {"streams", "_streams"},
    "stream": {"cuda", "copies", "self"},
    "device": {"cuda"},
    "Stream": {"cuda"},
}
"""On what a method of so common a name must be called to count."""

TORCH = '__import__("torch")'
DEFAULT = f'(lambda d: {TORCH}.cuda.default_stream(d) if d.type == "cuda" else None)'

NOT_NOTICED: dict[str, str] = {}
"""The mutants that no test can notice, by name, with the reason."""


class Mutant(NamedTuple):
    """One change to a file of the package."""

    name: str
    """``file:function:call``, with a number if the function has several of these calls."""
    file: str
    call: str
    """What stands there."""
    instead: str
    begin: int
    end: int

    def mutated(self, root: Path = ROOT) -> str:
        """Returns the text of the changed file."""
        source = (root / self.file).read_bytes()
        return (source[: self.begin] + self.instead.encode() + source[self.end :]).decode()


@functools.cache
def mutants(root: Path = ROOT) -> list[Mutant]:
    """Returns the mutants of the package in the order of its files."""
    found: list[Mutant] = []
    for path in sorted((root / "pipert").rglob("*.py")):
        file = str(path.relative_to(root))
        if not file.startswith(ONLY_TIMES):
            found += _mutants_of(path.read_bytes(), file)
    return found


def _mutants_of(source: bytes, file: str) -> Iterator[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    statements = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    numbers = Counter[str]()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        instead = _instead_of(node, id(node) in statements)
        if instead is not None:
            name = f"{file.removeprefix('pipert/')}:{_around(node, functions)}:{_name_of(node)}"
            numbers[name] += 1
            name += f" {numbers[name]}" if numbers[name] > 1 else ""
            begin = starts[node.lineno - 1] + node.col_offset
            assert node.end_lineno is not None and node.end_col_offset is not None
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(name, file, ast.unparse(node), instead, begin, end)


def _name_of(node: ast.Call) -> str:
    called = node.func
    return getattr(called, "attr", getattr(called, "id", ""))


def _around(node: ast.Call, functions: list[ast.FunctionDef]) -> str:
    """Returns the name of the innermost function around a call."""
    inside = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
    return max(inside, key=lambda f: f.lineno).name if inside else "module"


def _instead_of(node: ast.Call, is_statement: bool) -> str | None:
    """Returns what replaces a call, if it is one of those that order work on GPUs."""
    name, args = _name_of(node), [ast.unparse(arg) for arg in node.args]
    on = node.func.value if isinstance(node.func, ast.Attribute) else None
    receiver = getattr(on, "attr", getattr(on, "id", ""))
    if name in RECEIVERS and receiver not in RECEIVERS[name]:
        return None
    if name in DROPPED or name == "wait" and is_statement:
        return "None"
    if name == "wait":
        return args[-3] if len(args) > 2 else None  # the value that has to be waited for
    if name in ("compute_stream", "current_stream"):  # the stream that is not the caller's
        return f"{DEFAULT}({args[0]})" if args else None
    if name == "devices_with_own_streams":
        return "()"
    if name == "Stream":  # the stream that is not separate
        return f"{TORCH}.cuda.current_stream({args[0]})" if args else None
    if name == "get" or name == "stream" and receiver != "cuda":  # that of another micro-batch
        last = args[-1]
        others = [*args[:-1], f"{last[:-1]} + 1)" if last.endswith(")") else f"{last} + 1"]
        return f"{ast.unparse(node.func)}({', '.join(others)})"
    if name in CONTEXTS:
        return '__import__("contextlib").nullcontext()'
    if name == "copy" and {"source", "target"} <= set(args):
        swapped = {"source": "target", "target": "source"}
        return f"{ast.unparse(node.func)}({', '.join(swapped.get(arg, arg) for arg in args)})"
    return None
