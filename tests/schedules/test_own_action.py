"""A kind of action that somebody adds is a row in ``RULES`` and a row in ``ACTIONS``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from pipert import Observer, Pipe, TaskInfo
from pipert.schedules import Action, one_f_one_b, plan
from pipert.schedules.action import RULES, Rule, Size
from pipert.stage.actions import ACTIONS
from pipert.stage.stage import Stage
from tests.contract.ways import batch, grads_of, linear, mean, same

done: list[tuple[str, int, int]] = []
KINDS = "forward", "nothing", "done", "backward"  # an observer is told of "nothing" as it begins


def after_forward(action: Action, size: Size) -> Iterable[Action]:
    return [Action("F", action.i, action.j)]


def do_nothing(stage: Stage, i: int, _: object) -> None:
    done.append(("done", i, stage.place.j))


def with_pauses(m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
    """1F1B with an ``N`` after each ``F``."""
    for tick in one_f_one_b(m, n, placement):
        yield list(tick)
        yield [Action("N", i, j) for kind, i, j in tick if kind == "F"]


@pytest.fixture(autouse=True)
def nothing_is_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it takes."""
    monkeypatch.setitem(RULES, "N", Rule("nothing", lambda size: size.m, after_forward))
    monkeypatch.setitem(ACTIONS, "N", do_nothing)
    done.clear()


class Notes(Observer):
    def task_started(self, task: TaskInfo) -> None:
        done.append((task.phase, task.micro_batch, task.partition))


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_an_action_of_ones_own_runs_between_forward_and_backward(checkpoint: str) -> None:
    module, x = torch.nn.Sequential(*[linear(3, 3) for _ in range(3)]), batch(4)
    with Pipe(module, [1, 2], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint) as pipe:
        expected = pipe.forward_backward(x, loss_fn=mean)
        gradients = grads_of(pipe)
        pipe.zero_grad()
        pipe.add_observer(Notes())
        same(pipe.forward_backward(x, loss_fn=mean, schedule=with_pauses), expected)
        same(grads_of(pipe), gradients)
        for i in range(4):
            for j in range(2):
                where = [done.index((kind, i, j)) for kind in KINDS]
                assert where == sorted(where)
        assert [kind for kind, _, _ in done].count("done") == 8


def test_a_plan_shows_an_own_action() -> None:
    assert str(plan(with_pauses, 1, 2)) == "\n".join([
        "tick  0       1       2       3       4",
        "w=0   F[0,0]  N[0,0]                  B[0,0]",
        "w=1           F[0,1]  N[0,1]  B[0,1]",
    ])  # fmt: skip


def test_the_rule_of_an_own_action_is_checked() -> None:
    def too_early(m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
        yield [Action("N", 0, 0)]
        yield from with_pauses(m, n, placement)

    with pytest.raises(ValueError, match=r"N\[0,0\] is in tick 0 and needs F\[0,0\] before it"):
        plan(too_early, 1, 2)


def test_the_failure_of_an_own_action_names_it() -> None:
    def fail(stage: Stage, i: int, _: object) -> None:
        raise KeyError(i)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ACTIONS, "N", fail)
        module = torch.nn.Sequential(linear(3, 3), linear(3, 3))
        with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2) as pipe:
            with pytest.raises(KeyError) as caught:
                pipe.forward_backward(batch(2), loss_fn=mean, schedule=with_pauses)
    assert "in nothing N[0,0]: partition 0 on cpu" in "".join(caught.value.__notes__)
