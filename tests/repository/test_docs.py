"""Tests that the documentation's code runs, its links work, and no public name is left out."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pipert
import pipert.balance
import pipert.distributed
import pipert.observe
import pipert.schedules
import pipert.skip
from pipert import Pipe

ROOT = Path(__file__).parents[2]
DOCS, BENCHMARKS = ROOT / "docs", ROOT / "benchmarks"
OUTSIDE = [ROOT / "README.md", ROOT / "examples" / "README.md"]
OUTSIDE += [ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING")]
OUTSIDE += sorted(BENCHMARKS.glob("*.md"))
PAGES = [*sorted(DOCS.glob("*.md")), *OUTSIDE]

CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PLACE = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*")
FIGURE = re.compile(r"\[([^\]]+)\]\(([^)#:]*)#([^)]+)\)")
KINDS = {"python", "bash", "sh", "text"}
NEEDS = {
    "any_model": ("transformers", "accelerate", "peft"),
    "fine_tuning": ("transformers", "accelerate", "peft", "lightning"),
    "seeing": ("matplotlib",),
    "large_models": ("transformers", "accelerate", "safetensors"),
    "start": ("transformers",),
    "ddp": ("numpy",), "several_machines": ("numpy",),
}


def named(page: Path) -> str:
    return page.stem if page.parent == DOCS else str(page.relative_to(ROOT))


def given(page: Path) -> dict[str, object]:
    """What a reader of ``page`` is expected to have. The pages of the site show all they use."""
    if page != OUTSIDE[0]:
        return {}
    if torch.cuda.device_count() == 1:
        pytest.skip("two partitions need two GPUs, or none")
    a, b, c, d = (nn.Linear(8, 8) for _ in range(4))
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    llama = Blocks()
    return {"nn": nn, "a": a, "b": b, "c": c, "d": d, "data": [(x, target)], "llama": llama,
            "Llama": Blocks, "weights": llama.state_dict(),
            "batch": {"x": x, "labels": target}, "loader": [{"x": x, "labels": target}],
            "loss_fn": nn.functional.mse_loss,
            "optimizer": torch.optim.SGD(llama.parameters(), lr=0.1)}  # fmt: skip


class Blocks(nn.Module):
    """A model that is no Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"logits": x, "loss": nn.functional.mse_loss(x, labels)}


@pytest.mark.slow
@pytest.mark.usefixtures("one_measurement")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if CODE.search(p.read_text())], ids=named)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package, reason="the page uses it")
    monkeypatch.chdir(tmp_path)  # where pages that write files do so
    text = page.read_text()
    names = given(page)
    for block in CODE.finditer(text):
        # On the lines where they stand, so that tracebacks show them.
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_of_a_page_names_its_language(page: Path) -> None:
    """Only blocks marked ``python`` are run, so code must not be marked otherwise."""
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert {fence.strip() for fence in fences if "{" not in fence} <= KINDS
    assert ">>>" not in page.read_text()


# The reference ------------------------------------------------------------------------------------


def optional(name: str) -> list[ModuleType]:
    try:
        return [importlib.import_module(name)]
    except ImportError:
        return []


MODULES = [pipert, pipert.skip, pipert.balance, pipert.schedules, pipert.observe]
MODULES += [pipert.distributed]
MODULES += [*optional("pipert.prometheus"), *optional("pipert.transformers")]
PUBLIC = [(module, name) for module in MODULES for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_names_are_in_the_reference(module: ModuleType, name: str) -> None:
    """If this fails: add the name to docs/api.md."""
    shown = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", (DOCS / "api.md").read_text(), re.M)
    assert f"{module.__name__}.{name}" in shown


def examples_in(thing: object, name: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=isinstance(thing, type), exclude_empty=True)
    return [found for found in finder.find(thing, name, module=False) if found.examples]


EXAMPLES = [
    found
    for thing, name in [
        *((module, module.__name__) for module in MODULES),
        *((getattr(module, name), f"{module.__name__}.{name}") for module, name in PUBLIC),
    ]
    for found in examples_in(thing, name)
]


def test_every_public_function_has_an_example() -> None:
    functions = [(m, name) for m, name in PUBLIC if inspect.isfunction(getattr(m, name))]
    assert [name for m, name in functions if not examples_in(getattr(m, name), name)] == []


class Checker(doctest.OutputChecker):
    """An example that shows no output may have any: what counts is that it runs."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


class Table(nn.Module):
    """A first layer with a second argument."""

    def forward(self, x: torch.Tensor, attention_bias: torch.Tensor | None = None) -> torch.Tensor:
        return x if attention_bias is None else x + attention_bias


def known(pipe: Pipe) -> dict[str, Any]:
    """What the examples of the reference use and do not make."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "pipert": pipert, "balance": [4]}
    for module in (pipert, pipert.skip, pipert.balance, pipert.schedules):
        names |= {name: getattr(module, name) for name in module.__all__}
    (skips,) = examples_in(pipert.skip, "pipert.skip")
    for example in skips.examples:
        exec(example.source, names)
    a, b, c, d = (nn.Linear(8, 8) for _ in range(4))
    return names | {
        "a": a, "b": b, "c": c, "d": d, "body": nn.Identity(), "module": nn.Sequential(a, b, c, d),
        "x": torch.randn(8, 8), "target": torch.randn(8, 8), "mask": torch.ones(8, 1), "s": 2.0,
        "example": torch.randn(2, 8), "attention_bias": torch.zeros(8), "pipe": pipe,
        "loss_fn": nn.functional.mse_loss, "optimizer": torch.optim.SGD(a.parameters(), lr=0.1),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("one_measurement", "one_rank")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_examples_of_the_reference_run(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served: list[int] = []
    if example.name.startswith("pipert.prometheus"):
        monkeypatch.setattr("prometheus_client.start_http_server", served.append)
    layers = nn.Sequential(Table(), nn.Linear(8, 8))
    with Pipe(layers, balance=[1, 1], devices=["cpu", "cpu"]) as pipe:
        names = example.globs = known(pipe)
        for line in example.examples:
            line.options.pop(doctest.SKIP, None)  # which is for those who run doctest themselves
        runner = doctest.DocTestRunner(Checker(), verbose=False)
        assert runner.run(example, clear_globs=False).failed == 0
        example.globs = {}  # of which a pipe may be one
    if "metrics" in names:
        importlib.import_module("prometheus_client").REGISTRY.unregister(names["metrics"])


# The pictures -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sweep
def test_the_script_makes_every_picture_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with it")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # how long stages are is no matter here
    script = runpy.run_path(str(DOCS / "make_pictures.py"))
    script["main"](["--out", str(tmp_path), "--steps", "1"])
    made = {file.name for file in tmp_path.iterdir()}
    shown = {Path(link).name for page in PAGES for link in LINK.findall(page.read_text())}
    assert made == {file.name for file in (DOCS / "pictures").iterdir()}
    assert made == {name for name in shown if name.endswith(".svg")}


# Completeness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchor(heading: str) -> str:
    """Returns what both GitHub and MyST generate for ``heading``."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def prose(page: Path) -> str:
    """Returns the text of ``page`` without its blocks of code, whose comments are no headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def sections(page: Path) -> dict[str, str]:
    """Returns the sections of ``page``, each with those inside it, by anchors."""
    parts = re.split(r"^(#+) (.*)\n", prose(page), flags=re.MULTILINE)
    found: dict[str, str] = {}
    for k in range(1, len(parts), 3):
        inside = [parts[k + 2]]
        for level, heading, text in zip(parts[k + 3 :: 3], parts[k + 4 :: 3], parts[k + 5 :: 3]):
            if len(level) <= len(parts[k]):
                break
            inside += [heading, text]
        found.setdefault(anchor(parts[k + 1]), "\n".join(inside))
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    for link, place in PLACE.findall(page.read_text()):
        other = page.parent / link if link else page
        assert place in sections(other), f"{link}#{place}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_figure_links_to_the_section_of_the_benchmarks_where_it_stands(page: Path) -> None:
    """If this fails: a table was measured anew, so the sentence that quotes it changes, too."""
    text = prose(page)
    for quote, link, place in FIGURE.findall(text):
        other = (page.parent / link).resolve() if link else page
        if other.parent == BENCHMARKS:
            stood = NUMBER.findall(sections(other).get(place, ""))
            assert {*NUMBER.findall(re.sub("`.*?`", "", quote))} <= {*stood}, f"{quote}: {place}"
    if page.parent != BENCHMARKS:
        assert re.findall(r"\d+ (?:µs|us|ms|[KMG]iB|times as).*", FIGURE.sub("", text)) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_program_that_a_page_runs_exists(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"(?:python|torchrun(?: -\S+)*) ((?:benchmarks|examples)/\S+\.py)", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    modules = {name for name in re.findall(r"python -m ([\w.]+)", text) if name != "venv"}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_readme_leads_to_every_page() -> None:
    linked = set(LINK.findall(OUTSIDE[0].read_text()))
    # These are on the site alone: what includes a page that is outside of docs, and the reference.
    ours = {page for page in DOCS.glob("*.md") if page.read_text().startswith("```{include}")}
    assert {f"docs/{p.stem}.md" for p in {*DOCS.glob("*.md")} - ours - {DOCS / "api.md"}} <= linked


INTRODUCTION = OUTSIDE[0].read_text().partition("<!-- end of the introduction -->")[0]


def test_the_first_page_of_the_site_installs_and_says_what_is_untested() -> None:
    assert "```sh\npip install -c constraints.txt .\n```" in INTRODUCTION
    assert "**pipert has run on one real GPU, never yet on two.**" in INTRODUCTION
    assert "```{include} ../README.md\n:end-before: <!-- end of" in (DOCS / "index.md").read_text()


def test_ci_runs_each_command_of_readme_under_its_number() -> None:
    commands = re.findall(r"^```bash\n(.*?)^```", OUTSIDE[0].read_text(), re.DOTALL | re.MULTILINE)
    runs = (ROOT / ".ci" / "run").read_text()
    shortened = [
        (number, what, short)
        for number, edits in re.findall(r"readme_command (\d+) \| sed '([^']+)'", runs)
        for what, short in re.findall(r"s\|([^|]+)\|([^|]+)\|", edits)
    ]
    assert {int(number) for number, *_ in shortened} == {*range(1, len(commands) + 1)}
    for number, what, short in shortened:
        assert what in commands[int(number) - 1] and short != what


def test_every_directory_of_the_package_has_its_line() -> None:
    """If this fails: say in CONTRIBUTING.md what the directory is for."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    directories = {file.parent.name for file in (ROOT / "pipert").glob("*/*.py")}
    assert directories and [name for name in directories if f"`{name}/`" not in text] == []


def test_the_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert [file for file in named if not [*ROOT.glob(file), *(ROOT / "pipert").rglob(file)]] == []
