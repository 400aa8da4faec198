"""Reads the Python stack of another, running thread.

The standard way is ``sys._current_frames`` and ``traceback``. It walks the frames in Python while
the thread runs on, and so reads frames that the thread has already left. CPython 3.11 then
crashes, about once in a thousand looks at a busy thread. ``faulthandler`` writes all stacks
without releasing the interpreter; this module parses its text.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
import traceback

__all__: list[str] = []

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)', re.MULTILINE)


def stack_of(thread: threading.Thread) -> list[traceback.FrameSummary]:
    """Return the Python calls of ``thread``, innermost last; none if the thread has ended.

    It sees at most a hundred threads of a process, and the hundred innermost calls of each.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    for stack in text.split("\n\n"):
        head = _THREAD.match(stack)
        if head and int(head[1], 16) == thread.ident:
            return [
                traceback.FrameSummary(path, int(line), name.rpartition(".")[2])
                for path, line, name in reversed(_FRAME.findall(stack))
            ]
    return []
