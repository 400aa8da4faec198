"""``python -m pipert trace script.py ...``, or ``-m module ...``: records an unmodified script.

The pipes that the script makes are recorded from outside, and a report is printed when it ends.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipert.observe.event import Observer, RunInfo
from pipert.pipes.base import PipeBase, when_made
from pipert.timeline.timeline import Timeline


class _Traced(Observer):
    """An observer that records ``calls`` calls of one pipe after the first ``skip``.

    It records until the next call begins, so that backwards are included. It references no pipe.
    """

    def __init__(self, pipe: PipeBase, skip: int, calls: int) -> None:
        self._recording = pipe.record()
        self._open = contextlib.ExitStack()
        self._skip = skip
        self._last = skip + calls
        self.timeline: Timeline | None = None
        if skip == 0:
            self.timeline = self._open.enter_context(self._recording)
        pipe.add_observer(self)

    def run_started(self, run: RunInfo) -> None:
        if run.number == self._last:
            self.end()

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        if run.number == self._skip - 1:
            self.timeline = self._open.enter_context(self._recording)

    def end(self) -> Timeline | None:
        """Stop recording, and return the timeline, if anything is in it."""
        self._open.close()
        return self.timeline if self.timeline is not None and self.timeline.events else None


def add_parser(tools: Any) -> None:
    """Add ``trace`` to the tools of ``python -m pipert``."""
    parser = tools.add_parser(
        "trace",
        help="run a script and record its pipes",
        description="Run a script as python does, record the calls of each Pipe it makes, and print"
        " a report when it ends, for whatever reason. The exit status is the script's, but 1 if"
        " it succeeds and no call was recorded.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"),
        help="for Perfetto; a second pipe's goes to trace-1.json and so on (default: trace.json)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, help="a picture too: .png, .svg or .pdf")
    parser.add_argument("--skip", type=int, default=2, help="calls not to record, to warm up (2)")
    parser.add_argument(
        "--calls", type=int, default=3,
        help="calls to record (3); with more, the boxes of a picture get too narrow for numbers",
    )  # fmt: skip
    parser.add_argument(
        "-m", action="store_true", dest="is_module", help="SCRIPT is a module, as for python -m"
    )
    parser.add_argument("script", help="a Python file; the rest are its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=lambda arguments: _trace(arguments, parser))


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse up front a script that is not there, and what cannot be written at the end."""
    script: str = arguments.script
    if arguments.is_module and importlib.util.find_spec(script.partition(".")[0]) is None:
        parser.error(f"there is no module {script}; for a file, leave out -m")
    if not (arguments.is_module or Path(script).exists()):
        parser.error(f"there is no file {script}; for a module, write -m {script}")
    if arguments.skip < 0 or arguments.calls < 1:
        parser.error("--skip must not be negative, and --calls must be positive")
    for option, path in (("--out", arguments.out), ("--plot", arguments.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"{option} must be a file in a folder that is there, not {path}")
    if arguments.plot is not None:
        if arguments.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
            parser.error(f"--plot must end with .png, .svg or .pdf, not {arguments.plot.name}")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib: pip install matplotlib")


def _numbered(path: Path, number: int) -> Path:
    """Return ``path`` with the pipe's number, and the rank if a launcher has started the script."""
    rank = os.environ.get("RANK")
    stem = path.stem if rank is None else f"{path.stem}-rank{rank}"
    return path.with_stem(stem if number == 0 else f"{stem}-{number}")


def _recorded(traced: Sequence[_Traced]) -> list[Timeline]:
    """Stop recording, and return the timelines in which there is anything."""
    timelines = [one.end() for one in traced]
    return [timeline for timeline in timelines if timeline is not None]


def _finish(traced: Sequence[_Traced], arguments: argparse.Namespace) -> None:
    recorded = _recorded(traced)
    if not recorded:
        why = "the script made no Pipe and no pipert.pipeline" if not traced else (
            f"pipes made: {len(traced)}; the first {arguments.skip} calls of each are not recorded:"
            " give a smaller --skip, or let the script make more"
        )
        print(f"pipert: no call was recorded; {why}", file=sys.stderr)
    for number, timeline in enumerate(recorded):
        path = _numbered(arguments.out, number)
        timeline.save(path)
        print(f"\npipert: {path}", file=sys.stderr)
        try:
            print(timeline.report(), file=sys.stderr)
        except ValueError as error:  # no call was recorded completely
            print(error, file=sys.stderr)
        if arguments.plot is not None:
            timeline.plot(_numbered(arguments.plot, number))


def _trace(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the script, and report when it ends."""
    arguments.out = arguments.out.absolute()  # the script may change the working directory
    arguments.plot = arguments.plot and arguments.plot.absolute()
    _check(arguments, parser)
    traced: list[_Traced] = []
    when_made.append(lambda pipe: traced.append(_Traced(pipe, arguments.skip, arguments.calls)))
    process = os.getpid()

    def finish() -> None:
        if os.getpid() == process:  # not in a forked child
            _finish(traced, arguments)

    # At exit, so after the threads that the script leaves behind have ended, and however it ends.
    atexit.register(finish)
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    for thread in threading.enumerate():  # which may record, and the interpreter waits for anyway
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    return 0 if _recorded(traced) else 1


def _run(arguments: argparse.Namespace) -> None:
    """Run the script as ``__main__``, where pickle and spawned processes look."""
    sys.argv = [arguments.script, *arguments.arguments]
    if arguments.is_module:  # sys.path begins with the working directory, as under python -m
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments.script).absolute().parent)
        runpy.run_path(arguments.script, run_name="__main__")
