"""Finds the places where Python code can be interrupted, and raises there."""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = ["Raiser", "interrupted_at", "places", "within"]


@functools.cache
def places(code: CodeType) -> set[int]:
    """Returns the offsets where the interpreter checks for signals.

    That is at the start, after calls and at the targets of jumps back.
    """
    found, after = set(), False
    for instruction in dis.get_instructions(code):
        if after:
            found.add(instruction.offset)
        after = instruction.opname.startswith(("CALL", "RESUME"))
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
    return found


def of_pipert(code: CodeType) -> bool:
    return f"{os.sep}pipert{os.sep}" in code.co_filename


def of_pipert_or_thread(code: CodeType) -> bool:
    """Tells whether code belongs to pipert or to ``threading.Thread``.

    ``threading.Condition`` is left out: an interrupt can leave it locked, and no thread starts.
    """
    of_thread = code.co_filename == threading.__file__ and "Thread." in code.co_qualname
    return of_thread or of_pipert(code)


class Raiser:
    """A trace function, ``trace``, that raises at the ``k``-th place reached.

    Args:
        k: the number of the place, from 0.
        error: the type of the exception to raise.
        of: tells whether the places of a code object count.
        ready: tells whether places count by now.
    """

    def __init__(
        self,
        k: int,
        error: type[BaseException] = KeyboardInterrupt,
        of: Callable[[CodeType], bool] = of_pipert_or_thread,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._left, self._error, self._of, self._ready = k, error, of, ready
        self.where: str | None = None
        """The function and line where it raised; ``None`` if fewer places were reached."""

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.where is None and self._of(frame.f_code):
            # f_trace first: else there are no opcode events from Python 3.12 on.
            frame.f_trace = self._local
            frame.f_trace_opcodes = True
            return self._local
        return None

    def _local(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and frame.f_lasti in places(frame.f_code) and self._ready():
            if self.where is None and self._left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise self._error
            self._left -= 1
        return self._local


def interrupted_at(k: int, function: Callable[[], object], **options: Any) -> str | None:
    """Calls ``function``, raises at the ``k``-th place it reaches, and returns where."""
    raiser = Raiser(k, **options)
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 traces no opcodes in callees
    sys.settrace(raiser.trace)
    try:
        function()
    except BaseException:  # noqa: B036  threading may raise another one from it
        pass
    finally:
        sys.settrace(None)
    return raiser.where


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Returns the result of ``function``, or ``None`` if it takes longer."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
