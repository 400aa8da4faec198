"""A pipe in a notebook: a cell is interrupted and run again, with a real kernel of Jupyter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="it starts the kernel")
pytest.importorskip("ipykernel", reason="it is the kernel")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.main_thread,  # whose event loop the client uses
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LONG = 100  # seconds, after which a kernel that says nothing is a failure

MODEL = """
import copy, itertools, threading
import torch
from torch import nn
import pipert

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

torch.manual_seed(0)
x, target = torch.randn(8, 8), torch.randn(8, 8)
loss_fn = nn.functional.mse_loss

def count():
    return sum(thread.name.startswith("pipert") for thread in threading.enumerate())
"""


MAKE = {
    "any model": """
model = Model()
pipe = pipert.pipeline(model, ["layers.2"], devices=["cpu", "cpu"], chunks=4)
""",
    "Sequential": """
model = nn.Sequential(*Model().layers)
pipe = pipert.Pipe(model, [2, 2], devices=["cpu", "cpu"], chunks=4)
""",
}

AT_MOST = {"Sequential": 3, "any model": 3 + 4}  # workers and clock; micro-batches

STEPS = """
def step(pipe):
    pipe.forward_backward(x, target=target, loss_fn=loss_fn)

def call(pipe):
    loss_fn(pipe(x), target).backward()
"""

TRAIN = """
for k in itertools.count():
    {how}(pipe)
    if k == 10:
        print("training")
"""

IS_RIGHT = """
plain = copy.deepcopy(model)
plain.zero_grad()
loss_fn(plain(x), target).backward()
model.zero_grad()
{how}(pipe)
for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(parameter.grad, other.grad)
print("right")
"""


class Notebook:
    """A kernel, and the output of its cells."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def run(self, cell: str) -> str:
        """Run a cell to its end; return what it has printed, or raise what it has raised."""
        return self._read(self._client.execute(cell), None)

    def interrupt(self, cell: str, after: str) -> str:
        """Interrupt a cell once it has printed something; return the name of its error.

        It is ``none`` where the kernel was interrupted while it was about to tell it.
        """
        try:
            self._read(self._client.execute(cell), after)
        except CellError as error:
            return error.name
        return "none"

    def _read(self, request: str, interrupted_after: str | None) -> str:
        printed, failed = "", None
        while True:
            message = self._client.get_iopub_msg(timeout=LONG)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
                if interrupted_after is not None and interrupted_after in printed:
                    interrupted_after = None
                    self._manager.interrupt_kernel()
            elif kind == "error":
                failed = CellError(content["ename"], "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                if failed is not None:
                    raise failed
                return printed


class CellError(Exception):
    """An error raised by a cell."""

    def __init__(self, name: str, traceback: str) -> None:
        super().__init__(name, traceback)
        self.name = name


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    manager, client = jupyter_client.manager.start_new_kernel()
    try:
        found = Notebook(manager, client)
        found.run(MODEL + STEPS)
        yield found
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("how", ["step", "call"])
@pytest.mark.parametrize("kind", MAKE)
def test_a_cell_that_was_interrupted_may_be_run_again(
    notebook: Notebook, kind: str, how: str
) -> None:
    """With the same pipe, whose gradients are right, and whose threads do not pile up."""
    notebook.run(MAKE[kind])
    is_right, train = IS_RIGHT.format(how=how), TRAIN.format(how=how)
    assert notebook.run(is_right) == "right\n"
    for _ in range(3):
        assert notebook.interrupt(train, "training") in ("KeyboardInterrupt", "none")
        assert notebook.run(is_right) == "right\n"
    assert int(notebook.run("print(count())")) <= AT_MOST[kind]
    notebook.run("pipe.close()")
