"""Runs each test on a new thread, on which torch numbers graph nodes from zero.

torch numbers the nodes of graphs, separately on each thread. In its first step a worker advances
its number to that of the caller, which takes 0.1 us per node (``pipert/autograd/leaves.py``). That
is nothing in a program with one pipe. But after half of the tests pytest's main thread has made
some hundred thousand nodes, and each test has new workers: steps would take five times as long as
in a run of that test alone. Nor can skips that a failed forward leaves in its thread's store reach
other tests. Fixtures run on the main thread as usual.
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
    if not pyfuncitem.get_closest_marker("main_thread"):
        pyfuncitem.obj = _on_new_thread(pyfuncitem.obj)
    return (yield)


def _on_new_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Wraps a test so that it runs on a new thread; its exception is raised on this thread."""

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
