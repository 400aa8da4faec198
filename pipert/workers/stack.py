"""Where in Python another thread is, while it runs.

The standard way is ``sys._current_frames`` and ``traceback``. It walks the frames in Python, and
the thread goes on meanwhile: what it has left by then is read all the same. CPython 3.11 then
crashes, about once in a thousand looks at a thread that is busy. ``faulthandler`` writes all stacks
down without letting go of the interpreter; here its text is read back.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
import traceback

__all__: list[str] = []

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def stack_of(thread: threading.Thread) -> list[traceback.FrameSummary]:
    """The Python calls of ``thread``, the innermost last; of a thread that has ended none.

    Sees a hundred threads of a process and a hundred calls of each, the innermost.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    stack: list[traceback.FrameSummary] = []
    inside = False
    for line in lines:
        head, frame = _THREAD.match(line), _FRAME.match(line)
        if head:
            inside = int(head[1], 16) == thread.ident
        elif inside and frame:
            name = frame[3].rpartition(".")[2]
            stack.insert(0, traceback.FrameSummary(frame[1], int(frame[2]), name))
    return stack
