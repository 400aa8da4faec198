"""Tests faults on one rank of several: every rank ends, and says why."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipert import distributed, is_recomputing
from tests.distributed.launcher import Ended, endings, in_sweep, run
from tests.distributed.own_models import Head


class Oops(Exception):
    """The error raised by these tests' layers."""


_OOPS = f"{Oops.__module__}.Oops"


class Trap(nn.Module):
    """Passes a value on, and does what it is set to, once: in F, R or B of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []
        self.set_to("", 0, None)

    def set_to(self, phase: str, i: int, act: Any) -> None:
        self.phase, self.left, self.act = phase, i, act

    def happens(self, phase: str) -> None:
        if phase == self.phase:
            self.left -= 1
            if self.left < 0:
                self.phase = ""
                self.act()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(weakref.ref(x))
        self.happens("R" if is_recomputing() else "F")
        y: Tensor = _Sprung.apply(x, self)  # type: ignore[no-untyped-call]
        return y


class _Sprung(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.trap.happens("B")
        return dy, None


def trapped(n: int) -> nn.Sequential:
    """Makes three layers for each of ``n`` partitions."""
    torch.manual_seed(0)
    return nn.Sequential(*[one for _ in range(n) for one in (nn.Linear(4, 4), Trap(), nn.Tanh())])


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def step(pipe: distributed.Pipe, rows: int = 8, loss_fn: Any = F.mse_loss) -> Tensor:
    x, y = batch(rows)
    loss: Tensor = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
    return loss


def caught(do: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Returns the type and the whole text of the raised error."""
    try:
        do()
    except BaseException as error:  # noqa: B036  interrupts, too
        notes = getattr(error, "__notes__", ())
        return type(error), "\n".join([str(error), *notes])
    raise AssertionError("nothing was raised")


def check_works(pipe: distributed.Pipe, n: int, rows: int = 8) -> None:
    """Asserts that a step has the loss and the gradients of the plain module."""
    pipe.zero_grad()
    found = step(pipe, rows)
    plain = trapped(n)
    x, y = batch(rows)
    loss = F.mse_loss(plain(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, loss.detach())
    named = dict(plain.named_parameters())
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(p.grad, named[name].grad)


def trap_of(pipe: distributed.Pipe, k: int = 0) -> Trap:
    """Returns the trap of one of this rank's partitions."""
    trap = pipe.partitions[k][1]
    assert isinstance(trap, Trap)
    return trap


def grads(pipe: distributed.Pipe) -> list[Tensor]:
    """Returns copies of all gradients, which must exist."""
    return [p.grad.clone() for p in pipe.parameters() if p.grad is not None]


def fail() -> None:
    raise Oops("on purpose")


class Case(NamedTuple):
    j: int
    phase: str
    i: int


def layers_raise(rank: int, n: int, schedule: str, checkpoint: str, cases: list[Case]) -> None:
    gc.disable()  # what is alive is referenced
    ranks = torch.distributed.get_world_size()
    pipe = distributed.Pipe(
        trapped(n), [3] * n, chunks=4, schedule=schedule, checkpoint=checkpoint
    )
    traps = {j: trap_of(pipe, k) for k, j in enumerate(range(rank, n, ranks))}
    check_works(pipe, n)
    pipe(batch()[0])
    for j, phase, i in cases:
        before = grads(pipe)
        if j in traps:
            traps[j].set_to(phase, i, fail)
        for trap in traps.values():
            trap.seen.clear()
        kind, text = caught(lambda: step(pipe))
        where = f"[{i},{j}]: partition {j} on cpu"
        if j in traps:
            assert kind is Oops and text.startswith("on purpose\n"), (kind, text)
        else:
            assert kind is distributed.RankError, (kind, text)
            assert text.startswith(f"rank {j % ranks} failed: {_OOPS}: on purpose\n"), text
        assert f"{phase}{where}" in text and f"micro-batch {i} of 4" in text, text
        assert all(torch.equal(now, then) for now, then in zip(grads(pipe), before, strict=True))
        alive = [ref for trap in traps.values() for ref in trap.seen if ref() is not None]
        assert not alive, f"{len(alive)} after {phase}[{i},{j}]"
        if phase == "F":
            if j in traps:
                traps[j].set_to(phase, i, fail)
            kind, text = caught(partial(pipe, batch()[0]))
            assert kind is (Oops if j in traps else distributed.RankError), (kind, text)
            assert f"F{where}" in text, text
        check_works(pipe, n)


@pytest.mark.parametrize(
    "ranks, n, schedule, checkpoint",
    [
        (2, 2, "gpipe", "always"), (2, 2, "1f1b", "never"),
        in_sweep(4, 4, "1f1b", "always"), in_sweep(2, 4, "interleaved", "always"),
        (2, 4, "interleaved", "never"),
    ],
)  # fmt: skip
def test_an_error_in_a_layer_is_raised_on_all_ranks(
    ranks: int, n: int, schedule: str, checkpoint: str
) -> None:
    phases = "FB" if checkpoint == "never" else "FR"
    cases = [Case(j, phase, i) for j in range(n) for phase in phases for i in (0, 2)]
    run(ranks, layers_raise, n, schedule, checkpoint, cases)


def interrupts(rank: int) -> None:
    pipe = distributed.Pipe(trapped(2), [3, 3], chunks=4, checkpoint="always")
    trap = trap_of(pipe)
    for error in (KeyboardInterrupt, SystemExit):
        for phase in "FRB":
            for j in range(2):
                if j == rank:
                    trap.set_to(phase, 0, lambda error=error: _raise(error("on purpose")))
                kind, text = caught(lambda: step(pipe))
                assert kind is (error if j == rank else distributed.RankError), (kind, text)
                assert f"{phase}[0,{j}]: partition {j}" in text and "on purpose" in text, text
            check_works(pipe, 2)


def _raise(error: BaseException) -> None:
    raise error


def test_an_interrupt_or_exit_in_a_layer_ends_the_step_on_all_ranks() -> None:
    run(2, interrupts)


def two_fail(rank: int) -> None:
    pipe = distributed.Pipe(trapped(2), [3, 3], chunks=4)
    check_works(pipe, 2)
    trap = trap_of(pipe)
    trap.set_to("F", 2 - rank, fail)  # a later micro-batch on the first rank
    kind, text = caught(lambda: step(pipe))
    assert "F[1,1]: partition 1" in text and "F[2,0]" not in text, text
    assert kind is (Oops if rank else distributed.RankError)
    check_works(pipe, 2)
    if rank == 1:
        trap.forward = _only_what_is_not_zero  # type: ignore[method-assign]
    else:
        trap.set_to("F", 1, fail)
    kind, text = caught(lambda: step(pipe))  # what one raises is a consequence
    assert "Oops: on purpose" in text or kind is Oops
    assert "F[1,0]: partition 0" in text and "all zero" not in text, text


def _only_what_is_not_zero(x: Tensor) -> Tensor:
    if not x.any():
        raise ValueError("all zero")
    return x


def test_the_first_of_several_failures_is_raised() -> None:
    run(2, two_fail)


class Call(NamedTuple):
    """What a rank gives to a mini-batch, if it is not as usual."""

    x: Any = batch()[0]
    target: Any = batch()[1]
    loss_fn: Any = F.mse_loss
    more: dict[str, Any] = {}

    def make(self, pipe: distributed.Pipe) -> None:
        pipe.forward_backward(self.x, target=self.target, loss_fn=self.loss_fn, **self.more)


class Forward(Call):
    def make(self, pipe: distributed.Pipe) -> None:
        pipe.forward(self.x)


class Evaluation(Call):
    def make(self, pipe: distributed.Pipe) -> None:
        super().make(pipe.eval())


class Chunks(Call):
    def make(self, pipe: distributed.Pipe) -> None:
        pipe.chunks = 2
        super().make(pipe)


class Autocast(Call):
    def make(self, pipe: distributed.Pipe) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            super().make(pipe)


def _loss_fails(y: Tensor, target: Tensor) -> Tensor:
    raise Oops("in the loss")


def _no_grad(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y.detach(), target)


ON = distributed.RankError
CALLS: dict[str, tuple[Any, Any, type[BaseException], type[BaseException], str]] = {
    # given on the first rank and on the last, what they raise, and what both say
    "loss_fn raises": (
        Call(), Call(loss_fn=_loss_fails), ON, Oops, "F[0,1]: partition 1 on cpu, loss_fn",
    ),
    "loss without grad": (Call(), Call(loss_fn=_no_grad), ON, RuntimeError, "not require grad"),
    "rows differ": (
        Call(), Call(target=batch(6)[1]), ValueError, ValueError, "have 8 and the target on the la",
    ),
    "x has no rows there": (
        Call((batch()[0], batch(6)[0])), Call(), ValueError, ON, "same number of rows",
    ),
    "loss_fn is none": (Call(), Call(loss_fn=None), ON, TypeError, "loss_fn must be"),
    "loss_fn is none, first": (Call(loss_fn=None), Call(), TypeError, ON, "loss_fn must be"),
    "other reduction": (
        Call(more={"reduction": "sum"}), Call(), ValueError, ValueError, "reduction='sum'",
    ),
    "forward on the last": (Call(), Forward(), ValueError, ValueError, "'forward'"),
    "evaluation": (Evaluation(), Call(), ValueError, ValueError, "'evaluation'"),
    "chunks": (Chunks(), Call(), ValueError, ValueError, "0: "),
    "autocast": (Call(), Autocast(), ValueError, ValueError, "autocast=torch.bfloat16"),
    "other loss_scale": (
        Call(more={"loss_scale": torch.tensor(2.0)}),
        Call(more={"loss_scale": torch.amp.GradScaler("cpu", 4.0)}), ValueError, ValueError,
        "loss_scale=4.0",
    ),
}  # fmt: skip


def calls(rank: int) -> None:
    pipe = distributed.Pipe(trapped(2), [3, 3], chunks=4)
    for name, (*given, first, last, says) in CALLS.items():
        kind, text = caught(partial(given[rank].make, pipe))
        assert kind is (first, last)[rank], (name, kind, text)
        assert says in text, (name, text)
        assert all(p.grad is None for p in pipe.parameters()), name
        pipe.train().chunks = 4
    check_works(pipe, 2)


def test_what_ranks_give_does_not_go_together() -> None:
    run(2, calls)


class Changing(nn.Module):
    """A layer that returns a value set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.does: Any = _usual

    def forward(self, x: Tensor) -> Any:
        return self.does(x)


def _usual(x: Tensor) -> Any:
    return x, 1


class First(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[0] if isinstance(x, tuple) else x


def wrong(rank: int) -> None:
    """Ranks make pipes that do not go together."""
    def make(module: Any = None, balance: Any = (3, 3), **settings: Any) -> distributed.Pipe:
        return distributed.Pipe(module or trapped(2), balance, **settings)

    def fails(part: nn.Sequential) -> None:
        raise Oops("no wrap")

    other = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    same = "the same arguments and layers"
    cases: list[tuple[dict[str, Any], Any, Any, str]] = [
        ({"balance": [2, 4]}, ValueError, ValueError, same),
        ({"checkpoint": "always"}, ValueError, ValueError, same),
        ({"module": other}, ValueError, ValueError, same),
        ({"balance": [3, 4]}, ValueError, distributed.RankError, "balance"),
        ({"schedule": "zb-h1"}, ValueError, distributed.RankError, "schedule must be"),
        ({"device": "no device"}, RuntimeError, distributed.RankError, "no device"),
        ({"wrap": fails}, Oops, distributed.RankError, "no wrap"),
    ]
    for given, mine, others, says in cases:
        for bad in range(2):
            kind, text = caught(partial(make, **given if rank == bad else {}))
            assert kind is (mine if rank == bad else others), (given, kind, text)
            assert says in text, (given, text)
    check_works(make(chunks=4, mesh=DeviceMesh("cpu", [1, 0])), 2)
    check_works(make(chunks=4), 2)


def test_what_ranks_are_given_differs() -> None:
    run(2, wrong)


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def dying(rank: int, n: int, phase: str, how: str) -> list[tuple[type[BaseException], str]]:
    """The last one dies. The others say what they get."""
    pipe = distributed.Pipe(trapped(n), [3] * n, chunks=4)
    check_works(pipe, n)
    if rank == n - 1:
        if phase == "between":
            die(how)
        trap_of(pipe).set_to(phase, 1, lambda: die(how))
    before = {name: p.grad for name, p in pipe.named_parameters()}
    found = [caught(lambda: step(pipe)), caught(lambda: step(pipe))]
    found += [caught(lambda: pipe(batch()[0])), caught(lambda: pipe.grad_norm())]
    assert all(p.grad is before[name] for name, p in pipe.named_parameters())
    return found


def check_died(ended: list[Ended], dead: int, exitcode: int) -> None:
    for rank, one in enumerate(ended):
        if rank == dead:
            assert one.exitcode == exitcode
            continue
        assert one.error is None, one.text
        assert [kind for kind, _ in one.result] == [distributed.RankError] * 4
        (_, first), *others = one.result
        lost = f"rank {rank} lost the others"
        assert first.startswith(f"a rank ended or did not answer: {lost}"), first
        for _, text in others:
            assert text.startswith(lost) and text.endswith("start all ranks anew"), text


@pytest.mark.parametrize("phase", ["F", "B", "between"])
@pytest.mark.parametrize("n, how", [(2, "exit"), in_sweep(3, "kill")])
def test_a_rank_dies(n: int, how: str, phase: str) -> None:
    found = endings(n, dying, n, phase, how, group=2)
    check_died(found, n - 1, 3 if how == "exit" else -signal.SIGKILL)


def dying_at_construction(rank: int, where: str) -> tuple[type[BaseException], str]:
    dist.barrier()  # or the group itself may not come about
    if rank == 1 and where == "before":
        die("kill")
    wrap = (lambda _: die("kill")) if rank == 1 else None
    return caught(lambda: distributed.Pipe(trapped(2), [3, 3], wrap=wrap))


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["before", "wrap"])
def test_a_rank_dies_at_construction(where: str) -> None:
    first, second = endings(2, dying_at_construction, where, group=2)
    assert second.exitcode == -signal.SIGKILL and first.error is None, first.text
    kind, text = first.result
    assert kind is distributed.RankError and "a rank ended or did not answer" in text


def unpicklable(rank: int) -> None:
    changing = Changing()
    changing.does = _with_a_lock
    model = nn.Sequential(nn.Linear(4, 4), changing, First(), nn.Linear(4, 4))
    pipe = distributed.Pipe(model, [2, 2], chunks=4)
    kind, text = caught(lambda: step(pipe))
    assert kind is (distributed.RankError if rank else TypeError) and "pickle" in text, text
    changing.does = _usual
    step(pipe)


def _with_a_lock(x: Tensor) -> Any:
    return x, threading.Lock()


def test_what_crosses_cannot_be_sent() -> None:
    run(2, unpicklable)


class Refusing(tuple[Any, ...]):
    """A value that the second rank cannot unpickle."""

    def __reduce__(self) -> Any:
        return _refusing, tuple(self)


def _refusing(*values: Any) -> Any:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("unpickled on the second rank")
    return Refusing(values)


def _with_refusing(x: Tensor) -> Any:
    return x, Refusing()


def unreadable(rank: int) -> None:
    changing = Changing()
    changing.does = _with_refusing
    model = nn.Sequential(nn.Linear(4, 4), changing, First(), nn.Linear(4, 4))
    pipe = distributed.Pipe(model, [2, 2], chunks=4)
    kind, text = caught(lambda: step(pipe))
    assert kind is (ZeroDivisionError if rank else distributed.RankError), text
    assert "unpickled on the second rank" in text and "F[0,1]" in text, text
    changing.does = _usual
    step(pipe)


def test_what_crosses_cannot_be_received() -> None:
    run(2, unreadable)


def warns_of_loss(rank: int) -> None:
    pipe = distributed.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=4)
    x, target = torch.ones(8, 4), torch.tensor([0, 1, 2, 3, -100, -100, 0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn = nn.CrossEntropyLoss()
        kind, text = caught(lambda: pipe.forward_backward(x, target=target, loss_fn=loss_fn))
    assert kind is (UserWarning if rank else distributed.RankError) and "reduction='sum'" in text
    step(pipe)


def test_one_rank_fails_between_the_reports_and_the_schedule() -> None:
    run(2, warns_of_loss)


class Views(nn.Module):
    """A layer that returns a tensor and a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, :2]


class InPlace(nn.Module):
    """A layer that changes one of two tensors, or none, in place."""

    changes = True

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, view = value
        x = x.mul_(2.0) if self.changes else x * 2.0
        return x + view.sum(1, keepdim=True)


def views(rank: int) -> None:
    torch.manual_seed(0)
    changing = InPlace()
    model = nn.Sequential(nn.Linear(4, 4), Views(), nn.Identity(), changing, nn.Linear(4, 4))
    pipe = distributed.Pipe(model, [2, 3], chunks=4)
    for checks in (True, False, True):
        changing.changes = checks
        if checks:
            kind, text = caught(lambda: step(pipe))
            assert kind in (RuntimeError, distributed.RankError), text
            assert "share memory" in text and "changed in place" in text, text
        else:
            step(pipe)


def test_of_tensors_that_shared_memory_one_is_changed() -> None:
    run(2, views)


def alone(rank: int) -> None:
    """The first rank calls what the other does not."""
    pipe = distributed.Pipe(trapped(2), [3, 3], chunks=4)
    check_works(pipe, 2)
    kind, text = caught((lambda: step(pipe)) if rank else pipe.grad_norm)
    assert kind is ValueError and "0: grad_norm(); 1: a mini-batch" in text, (kind, text)
    check_works(pipe, 2)
    if rank == 0:
        assert caught(lambda: pipe.grad_norm("x"))[0] is ValueError  # type: ignore[arg-type]
    else:
        assert caught(pipe.grad_norm)[0] is distributed.RankError
    kind, text = caught(lambda: pipe.grad_norm(1.0 + rank))
    assert kind is ValueError and "the same norm_type" in text, text
    check_works(pipe, 2)


def test_one_rank_calls_alone() -> None:
    run(2, alone)


def _tied(sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(7, 4, sparse=sparse)
    return nn.Sequential(embedding, nn.Linear(4, 4), Head(embedding.weight))


def shares(rank: int, sparse: bool) -> None:
    """A shared weight is frozen on one rank alone; or its gradient is sparse on one."""
    pipe = distributed.Pipe(_tied(sparse), [2, 1])
    tokens = torch.arange(6)
    own = next(pipe.parameters())

    def train() -> Tensor:
        loss: Tensor = pipe.forward_backward(tokens, target=tokens, loss_fn=F.cross_entropy)
        return loss

    own.requires_grad_(rank == 1)
    kind, text = caught(train)
    assert kind is ValueError and "require grad on all of them or on none" in text, text
    own.requires_grad_()
    loss = train()
    plain = _tied(False)
    expected = F.cross_entropy(plain(tokens), tokens)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(own.grad, next(plain.parameters()).grad)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_shared_weight_differs_between_ranks(sparse: bool) -> None:
    run(2, shares, sparse)
