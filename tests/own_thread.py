"""Each test of a directory runs on a new thread, on which torch counts nodes from zero.

torch numbers the nodes of graphs, and each thread counts for itself. A worker's first step begins
where its caller is, 0.1 us a node (``pipert/autograd/leaves.py``). That is nothing in a program
with one pipe; but pytest's main thread has made some hundred thousand nodes when half of the tests
have run, and each test has workers of its own: steps would take five times as long in there as
they do alone. The ``conftest.py`` of directories with many steps imports the hook below. Fixtures
run on the main thread as ever.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["pytest_pyfunc_call"]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    pyfuncitem.obj = _on_new_thread(pyfuncitem.obj)
    return (yield)


def _on_new_thread(test: Callable[..., None]) -> Callable[..., None]:
    """The same test; what it raises is raised here."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        raised: list[BaseException] = []

        def target() -> None:
            try:
                test(**arguments)
            except BaseException as error:  # noqa: B036  raised below, such as of pytest.skip
                raised.append(error)

        thread = threading.Thread(target=target, name="test", daemon=True)
        thread.start()
        thread.join()
        if raised:
            raise raised.pop()

    return run
