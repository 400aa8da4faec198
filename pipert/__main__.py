"""``python -m pipert trace script.py ...``: record the pipes of a script that does not know it."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from pipert.observe import Observer, RunInfo
from pipert.pipe import Pipe, when_made
from pipert.timeline.timeline import Timeline

__all__: list[str] = []


class _Traced(Observer):
    """Records some calls of one pipe: those after the first ``skip``, ``calls`` of them.

    Their backwards, too: it goes on until the call after them begins.
    """

    def __init__(self, pipe: Pipe, skip: int, calls: int) -> None:
        self._recording = pipe.record()
        self._open = contextlib.ExitStack()
        self._skip = skip
        self._last = skip + calls
        self.timeline: Timeline | None = None
        if skip == 0:
            self._begin()
        pipe.add_observer(self)

    def _begin(self) -> None:
        self.timeline = self._open.enter_context(self._recording)

    def run_started(self, run: RunInfo) -> None:
        if run.number == self._last:
            self.end()

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        if run.number == self._skip - 1:
            self._begin()

    def end(self) -> None:
        self._open.close()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipert", description="Tools of pipert.")
    tools = parser.add_subparsers(dest="tool", required=True)
    trace = tools.add_parser(
        "trace",
        help="run a script and record its pipes",
        description="Run a script as python does, record the calls of each Pipe it makes, and print"
        " a report at its end, however it ends.",
    )
    trace.add_argument("--out", type=Path, default=Path("trace.json"), help="for Perfetto; a second"
                       " pipe's goes to trace-1.json and so on (default: trace.json)")  # fmt: skip
    trace.add_argument("--plot", type=Path, help="a picture too: .png, .svg or .pdf")
    trace.add_argument("--skip", type=int, default=2, help="calls not to record, to warm up (2)")
    trace.add_argument("--calls", type=int, default=10, help="calls to record (10)")
    trace.add_argument("script", help="a Python file; the rest are its arguments")
    trace.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    if arguments.skip < 0 or arguments.calls < 1:
        parser.error("--skip must not be negative, and --calls must be positive")
    return arguments


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_stem(f"{path.stem}-{number}")


def _finish(traced: Sequence[_Traced], arguments: argparse.Namespace) -> None:
    recorded = []
    for one in traced:
        one.end()
        if one.timeline is not None and one.timeline.events:
            recorded.append(one.timeline)
    if not recorded:
        print(
            f"no call was recorded: {len(traced)} pipes were made, and the first "
            f"{arguments.skip} calls of each are not recorded (--skip)",
            file=sys.stderr,
        )
    for number, timeline in enumerate(recorded):
        path = _numbered(arguments.out, number)
        timeline.save(path)
        print(f"\n{path}: {timeline!r}\n\n{timeline.report()}", file=sys.stderr)
        if arguments.plot is not None:
            timeline.plot(_numbered(arguments.plot, number))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script and report."""
    arguments = _parse(argv)
    traced: list[_Traced] = []
    when_made.append(lambda pipe: traced.append(_Traced(pipe, arguments.skip, arguments.calls)))
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path[0] = str(Path(arguments.script).parent)
    try:
        runpy.run_path(arguments.script, run_name="__main__")
    finally:
        _finish(traced, arguments)


if __name__ == "__main__":
    main()
