"""Configures Sphinx: ``sphinx-build -W --keep-going -n -b html docs docs/_build/html``.

The pages are Markdown and are also read on GitHub, so links to files outside
this folder are paths. Some of these files are pages here, too: ``ALSO_HERE``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

sys.path.insert(0, str(Path(__file__).parents[1]))  # these pages' own pipert, installed or not

import pipert  # noqa: E402

project = "pipert"
author = copyright = "the pipert authors"
version = release = pipert.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"pipert {release}"
html_copy_source = html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "native"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"undoc-members": True}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Types of torch and of Python. Their inventories are on the network, and a build needs none.
nitpick_ignore_regex = [
    (r"py:class", r"pipert\..*\.M"),  # a variable of types
    (r"py:exc", r"OutOfMemoryError"),
    (r"py:.*", r"(torch|nn|collections|contextlib|os|pathlib|prometheus_client|transformers)\..*"),
]

ALSO_HERE = {
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../README.md": "index.md",
    "../benchmarks/README.md": "benchmarks.md",
    "../benchmarks/models.md": "models.md",
    "../benchmarks/paper.md": "paper.md",
    "../examples/README.md": "examples.md",
}


def link_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Link to the page of an outside file that is also a page here."""
    for path, page in ALSO_HERE.items():
        source[0] = source[0].replace(f"]({path}", f"]({page}")


def link_from_here(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """Turn the links of what a page includes from the root into links of this folder."""
    if path in (Path("../README.md"), Path("../CONTRIBUTING.md")):
        content[0] = content[0].replace("](docs/", "](")
        for outside, page in ALSO_HERE.items():
            content[0] = content[0].replace(f"]({outside.removeprefix('../')}", f"]({page}")


def link_to_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Any
) -> Any:
    """Resolve a name given by its defining module, ``pipert.status.Statistics``, or alone, to the
    public name that it is documented under."""
    domain = env.domains.python_domain
    target = str(node.get("reftarget", ""))
    name = target.rpartition(".")[2] if target.startswith("pipert.") else target
    places = ("pipert", "pipert.skip", "pipert.balance", "pipert.observe")
    found = [f"{place}.{name}" for place in places if f"{place}.{name}" in domain.objects]
    if not found:
        return None
    kind = node["reftype"]
    return domain.resolve_xref(env, node["refdoc"], app.builder, kind, found[0], node, contnode)


# Napoleon takes the words before a colon for a type: of an attribute, and of what is returned. Here
# types are annotated, and a colon is a colon.
COLON = "\ue000"


def hide_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Before napoleon."""
    returned = False
    for k, line in enumerate(lines):
        indented = line.startswith(" ")
        if line and not indented:
            returned = line == "Returns:"
        if what in {"attribute", "property", "data"} or (returned and indented):
            lines[k] = line.replace(": ", f"{COLON} ")


def show_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """After it."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", link_to_pages)
    app.connect("include-read", link_from_here)
    app.connect("missing-reference", link_to_public_name)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)
