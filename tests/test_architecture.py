"""The house rules that a machine can check: layers, budgets, docstrings, the public surface."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path

import pytest

import pipert

ROOT = Path(pipert.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Each may import from the groups above its own and from its own group. docs/architecture.md says
# why they are in this order.
LAYERS = [
    {"errors", "_typing", "status"},
    {"value", "device", "microbatch", "schedule", "schedules", "components"},
    {"queues", "process_lock"},
    {"stream"},
    {"autograd", "recording"},
    {"workers"},
    {"tied", "partition", "progress", "skip", "batchnorm", "observe", "ledger", "overdue"},
    {"computation", "run", "lane"},
    {"gradients", "step", "step_lane"},
    {"recorded_lane"},
    {"clock", "watch", "runtime"},
    {"balance"},
    {"timeline"},
    {"partitioned", "pipe"},
    {"prometheus", "__init__"},
    {"check", "traced_script"},
    {"__main__"},
]

PUBLIC = {
    "NestedCheckpointError",
    "Event",
    "Observer",
    "Pipe",
    "PipeClosedError",
    "PipelineTimeout",
    "PipertError",
    "RecomputationError",
    "Replicate",
    "ReentrantCallError",
    "RunInfo",
    "Statistics",
    "TaskInfo",
    "TaskStatus",
    "Timeline",
    "TransformError",
    "WorkerBusyError",
    "WorkerDiedError",
    "WorkerStatistics",
    "__version__",
    "is_checkpointing",
    "is_recomputing",
}


def name_of(file: Path) -> str:
    """The first part of a file's place below the package: ``autograd``, ``pipe``."""
    relative = file.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def layer_of(name: str) -> int:
    return next(k for k, names in enumerate(LAYERS) if name in names)


def imports_of(file: Path) -> list[tuple[str, bool]]:
    """What ``file`` imports, as dotted names, and whether outside of functions."""
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    top = {id(n) for n in ast.walk(tree)} - {id(n) for f in functions for n in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert node.level == 0, f"{file}: relative import; write pipert.x.y"
            if module == "pipert":
                found += [(f"pipert.{alias.name}", id(node) in top) for alias in node.names]
            else:
                found.append((module, id(node) in top))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_up_the_list_of_layers(file: Path) -> None:
    own = layer_of(name_of(file))
    for module, _ in imports_of(file):
        if module.startswith("pipert."):
            assert layer_of(module.split(".")[1]) <= own, f"{file} imports {module}"


def test_the_import_graph_has_no_cycle() -> None:
    graph = {}
    for file in FILES:
        parts = ("pipert", *file.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        graph[name] = {m for m, _ in imports_of(file) if m.startswith("pipert")} - {name}
    done: set[str] = set()
    while len(done) < len(graph):
        free = {n for n in graph if n not in done and (graph[n] & graph.keys()) <= done}
        assert free, f"a cycle among {sorted(graph.keys() - done)}"
        done |= free


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_import_hides_inside_a_function(file: Path) -> None:
    assert all(top for _, top in imports_of(file))


def test_queues_do_not_know_torch() -> None:
    for file in FILES:
        if name_of(file) == "queues":
            assert not [m for m, _ in imports_of(file) if m.split(".")[0] == "torch"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_module_is_named_like_one_of_the_standard_library(file: Path) -> None:
    # A leading underscore marks the private modules of both.
    assert file.stem.startswith("_") or file.stem not in sys.stdlib_module_names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_module_has_a_docstring_and_a_surface(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), f"{file} says nothing about itself"
    names = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
             if isinstance(t, ast.Name)]  # fmt: skip
    names += [n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)
              and isinstance(n.target, ast.Name)]  # fmt: skip
    assert "__all__" in names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_budgets_hold(file: Path) -> None:
    source = file.read_text()
    assert source.count("\n") <= 400, f"{file} is longer than 400 lines; split it"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= 60, f"{file}: {node.name} is longer than 60 lines; split it"


def test_the_public_surface_is_what_it_was() -> None:
    """If this fails on purpose: change PUBLIC, add a line to CHANGELOG.md and to the docs."""
    assert set(pipert.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_what_is_public_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(pipert, name))


# What needs an extra, and what that brings. Nothing else imports these modules.
OPTIONAL = {"prometheus": "prometheus_client"}


def test_import_needs_torch_alone() -> None:
    known = {"torch", "pipert", "__future__"} | set(sys.stdlib_module_names)
    for file in FILES:
        extra = {OPTIONAL[name_of(file)]} if name_of(file) in OPTIONAL else set()
        for module, _ in imports_of(file):
            assert module.split(".")[0] in known | extra, f"{file} imports {module}"
            assert not module.startswith(tuple(f"pipert.{name}" for name in OPTIONAL))


def test_every_module_imports() -> None:
    for file in FILES:
        parts = ("pipert", *file.relative_to(ROOT).with_suffix("").parts)
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
