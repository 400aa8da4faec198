"""Calls a function on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Caller"]


class Caller(threading.Thread):
    """A started thread that calls ``function``.

    Args:
        function: the function to call.
        patience: seconds after which the call counts as hanging.
    """

    def __init__(self, function: Callable[[], Any], patience: float = 10.0) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._patience = patience
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: B036  raised by result
            self._error = error

    def result(self) -> Any:
        """Waits for ``function``; returns its result or raises its exception."""
        self.join(self._patience)
        assert not self.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._result
