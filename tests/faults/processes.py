"""Provides the beginning of scripts that test a model whose steps can fail anywhere.

Each script runs in its own process. A step is a call with its backward, or a whole step; the
script's ``HOW`` says which.
"""

from __future__ import annotations

from tests.engine.test_exit import PRELUDE, run

HOWS = ("call", "gpipe", "1f1b")

# A model with skips and deferred batch norm; ``act(where)`` is called in each layer of its middle
# partition, and in its backward.
STEP = (
    PRELUDE
    + """
import logging
from pipert import is_recomputing
from pipert.skip import Skippable, pop, skippable, stash

@skippable(stash=["skip"])
class Stash(Skippable):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        yield stash("skip", x * self.weight)
        return x

@skippable(pop=["skip"])
class Pop(Skippable):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip

act = lambda where: None

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        act("backward")
        return grad

class Acts(nn.Linear):
    def forward(self, x):
        y = super().forward(x).tanh()
        act("recomputation" if is_recomputing() else "forward")
        return Backward.apply(y)

torch.manual_seed(0)
torch.set_num_threads(1)
FIRST, POPPING = (Stash(), Pop()) if Pipe.__name__ == "Pipe" else (nn.Linear(3, 3), nn.Identity())
MODEL = nn.Sequential(
    FIRST, nn.Linear(3, 3), Acts(3, 3), Acts(3, 3), POPPING, nn.BatchNorm1d(3))
X = torch.randn(8, 3)

def pipe_of(checkpoint, **options):
    return Pipe(MODEL, [2, 2, 2], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint,
                deferred_batch_norm=True, **options)

HOW = "call"

def cube(y, target):
    return y.pow(3).sum()

def train(pipe, x=X):
    '''Runs a step that adds to existing gradients; returns the output of a call, in a list.'''
    if HOW != "call":
        return pipe.forward_backward(x, loss_fn=cube, schedule=HOW, reduction="sum") and []
    y = pipe(x)
    cube(y, None).backward()
    return [y]

def grads(model):
    return [parameter.grad for parameter in model.parameters()]

def step(pipe, x=X):
    pipe.zero_grad()
    return train(pipe, x) + grads(pipe)

def expected(x=X):
    '''Returns the results of a step with one partition and without checkpointing.'''
    NEVER.zero_grad()
    y = NEVER(x)
    cube(y, None).backward()
    return [y][: HOW == "call"] + grads(NEVER)

def right(found, wanted):
    return all(map(torch.allclose, found, wanted, [1e-4] * 99, [1e-5] * 99))

def wheres(*names):
    '''Returns the places where a step may be hit, each with every mode of checkpointing.'''
    return [(where, mode) for where in names for mode in ("always", "except_last", "never")
            if (where, mode) != ("recomputation", "never")]

def in_child(function, *args):
    '''Calls a function in a fork, while there are no other threads; returns its exit code.'''
    assert threading.active_count() == 1
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        function(*args)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def hit(target, number, seconds=0.02):
    '''Returns an act that sends this process a signal, once, and goes on for a while.'''
    sent = []

    def act(where):
        if where == target and not sent:
            sent.append(True)
            os.kill(os.getpid(), number)
            time.sleep(seconds)

    return act

NEVER = Pipe(MODEL, [6], devices=["cpu"], chunks=4, checkpoint="never", deferred_batch_norm=True)

def is_right(pipe, x=X):
    '''Tells whether a step has the expected results.'''
    return right(step(pipe, x), expected(x))
"""
)


def ends(script: str, how: str = "call", whole_end: bool = False) -> tuple[int, str, str]:
    """Runs a script; returns its exit code, stdout and stderr."""
    result = run(f"HOW = {how!r}\n{script}", STEP, whole_end=whole_end)
    return result.returncode, result.stdout, result.stderr
