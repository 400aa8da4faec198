"""Runs a tool, ``python -m pipert TOOL ...``; the parser of each is in the tool's own file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pipert
from pipert import check, demo

_TOOLS = (demo, check)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a tool and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipert", description="Tools of pipert.")
    parser.add_argument("--version", action="version", version=f"pipert {pipert.__version__}")
    tools = parser.add_subparsers(dest="tool", required=True)
    for tool in _TOOLS:
        tool.add_parser(tools)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
