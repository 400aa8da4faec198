"""The house rules that a machine can check: layers, budgets, docstrings, the public surface."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pipert
from pipert import _torch

ROOT = Path(pipert.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Rooms, from the ground up: each may import from those below it and from its own.
ROOMS = [
    {"errors", "_typing", "_torch", "status"},
    {"queues"},  # knows no torch
    {"schedules", "batch"},
    {"autograd"},
    {"workers"},
    {"observe"},
    {"skip"},
    {"layers", "recompute"},
    {"model"},
    {"stage"},
    {"any_model"},
    {"engine"},
    {"balance"},
    {"pipes"},
    {"pipe", "pipeline", "prometheus"},
    {"planning"},
    {"__init__"},
    {"check", "demo", "transformers"},
    {"distributed"},  # which nothing below imports
    {"__main__"},
]

PUBLIC = {
    "ModulePipe",
    "NestedCheckpointError",
    "NotBatchFirstWarning",
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
    "SharedStateWarning",
    "Statistics",
    "TaskInfo",
    "Timeline",
    "TransformError",
    "WholeBatchWarning",
    "WorkerBusyError",
    "WorkerDiedError",
    "WorkerStatistics",
    "__version__",
    "current_microbatch",
    "empty_parameters",
    "is_checkpointing",
    "is_recomputing",
    "never_recompute",
    "pipeline",
    "plan_for",
}


def name_of(file: Path) -> str:
    """The first part of a file's place below the package: ``autograd``, ``pipe``."""
    relative = file.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def room_of(name: str) -> int:
    return next(k for k, names in enumerate(ROOMS) if name in names)


@functools.cache
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


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_rooms_import_only_from_below() -> None:
    above = [
        f"{relative(file)} imports {module}"
        for file in FILES
        for module, _ in imports_of(file)
        if module.startswith("pipert.") and room_of(module.split(".")[1]) > room_of(name_of(file))
    ]
    assert not above


def import_graph() -> dict[str, set[str]]:
    """What each module imports, functions included."""
    graph = {}
    for file in FILES:
        parts = ("pipert", *file.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        graph[name] = {m for m, _ in imports_of(file)} - {name}
    return graph


def test_the_import_graph_has_no_cycle() -> None:
    graph = {name: {m for m in of if m.startswith("pipert")} for name, of in import_graph().items()}
    done: set[str] = set()
    while len(done) < len(graph):
        free = {n for n in graph if n not in done and (graph[n] & graph.keys()) <= done}
        assert free, f"a cycle among {sorted(graph.keys() - done)}"
        done |= free


def test_no_import_hides_inside_a_function() -> None:
    assert not [relative(file) for file in FILES if not all(top for _, top in imports_of(file))]


def test_queues_do_not_reach_torch() -> None:
    graph = import_graph()
    reached, left = set[str](), [name for name in graph if name.startswith("pipert.queues")]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += graph.get(name, ())
    assert not [name for name in reached if name.split(".")[0] == "torch"]


PRIVATE_BUT_STABLE = {"_modules", "_parameters", "_buffers", "_version"}
OF_OTHERS = {
    "_hf_hook",  # of accelerate
    "_loss_shifts_labels", "_prepare_inputs",  # of transformers.Trainer, for its subclasses
    "_fields", "_replace",  # of named tuples: public
}


def private_names(tree: ast.Module) -> set[str]:
    """The private attributes and modules that a file reads."""
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            read |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            read |= {part for alias in node.names for part in alias.name.split(".")}
    return {name for name in read if name.startswith("_") and not name.startswith("__")}


def defined_names(tree: ast.Module) -> set[str]:
    """The names that a file gives to functions, classes, variables and attributes of its own."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def test_private_names_of_others_stand_in_one_file() -> None:
    trees = {file: ast.parse(file.read_text()) for file in FILES if file.name != "_torch.py"}
    ours = set[str]().union(*map(defined_names, trees.values())) | {"_torch", "_typing"}
    allowed = ours | PRIVATE_BUT_STABLE | OF_OTHERS
    found = {relative(file): sorted(private_names(tree) - allowed) for file, tree in trees.items()}
    assert not {file: names for file, names in found.items() if names}
    assert not {"_base", "_cdata", "_backward_hooks", "_forward_pre_hooks"} & ours


def test_there_are_at_most_sixty_private_names() -> None:
    assert len({*_torch.NEEDED, *_torch.OTHERS}) <= 60


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    # A leading underscore marks the private modules of both.
    taken = [file for file in FILES if file.stem in sys.stdlib_module_names]
    assert not [relative(file) for file in taken if not file.stem.startswith("_")]


def test_the_root_has_at_most_twelve_modules() -> None:
    assert len([file for file in FILES if file.parent == ROOT]) <= 12


def test_every_module_has_a_docstring() -> None:
    lacking = [file for file in FILES if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not lacking


def test_no_file_is_longer_than_400_lines() -> None:
    assert not [relative(file) for file in FILES if file.read_text().count("\n") > 400]


def test_no_function_is_longer_than_60_lines() -> None:
    long = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                if length > 60:
                    long.append(f"{relative(file)}: {node.name}")
    assert not long


def test_the_public_surface_is_unchanged() -> None:
    """If this fails on purpose: change PUBLIC, add a line to CHANGELOG.md and to the docs."""
    assert set(pipert.__all__) == PUBLIC


def test_public_names_are_documented() -> None:
    assert all(inspect.getdoc(getattr(pipert, name)) for name in PUBLIC - {"__version__"})


# What needs an extra, and what that brings. Nothing else imports these modules.
OPTIONAL = {"prometheus": "prometheus_client", "transformers": "transformers"}


def test_import_needs_torch_alone() -> None:
    known = {"torch", "pipert", "__future__"} | set(sys.stdlib_module_names)
    for file in FILES:
        extra = {OPTIONAL[name_of(file)]} if name_of(file) in OPTIONAL else set()
        for module, _ in imports_of(file):
            assert module.split(".")[0] in known | extra, f"{file} imports {module}"
            assert not module.startswith(tuple(f"pipert.{name}" for name in OPTIONAL))


def test_several_processes_are_imported_by_those_who_ask() -> None:
    code = "import sys, pipert; sys.exit('pipert.distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_module_imports() -> None:
    for file in FILES:
        if (needed := OPTIONAL.get(name_of(file))) and importlib.util.find_spec(needed) is None:
            continue
        parts = ("pipert", *file.relative_to(ROOT).with_suffix("").parts)
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
