"""The order of operations: each race, beside the fix that makes the same program legal."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.cuda

Kinds = Callable[[], list[str]]
DEVICE = torch.device("cuda:0")


def streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Makes two streams, neither of which is the default stream."""
    return torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)


def zeros() -> torch.Tensor:
    """Makes memory that every stream may use, because the host has waited for it."""
    x = torch.zeros(8, device=DEVICE)
    torch.cuda.synchronize(DEVICE)
    return x


def test_a_write_that_does_not_wait_for_a_read_is_a_race(kinds: Kinds) -> None:
    a, b = streams()
    x = zeros()
    with torch.cuda.stream(a):
        x.sum()
    with torch.cuda.stream(b):
        x.add_(1)
    assert "RACE" in kinds()


def test_two_reads_are_no_race(kinds: Kinds) -> None:
    a, b = streams()
    x = zeros()
    for stream in (a, b):
        with torch.cuda.stream(stream):
            x.sum()
    assert kinds() == []


def test_a_use_that_does_not_wait_for_the_allocation_is_a_race_with_it(kinds: Kinds) -> None:
    a, b = streams()
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(a):
        torch.ones(4, device=DEVICE).add_(1)  # what `a` does before it allocates
        x = torch.empty(8, device=DEVICE)
    with torch.cuda.stream(b):
        x.zero_()
    assert kinds() == ["ALLOC-RACE"]


def wait_stream(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    b.wait_stream(a)


def wait_event(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    b.wait_event(a.record_event())


def event_wait(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record(a)
    event.wait(b)


def by_a_third_stream(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    third = torch.cuda.Stream(DEVICE)
    third.wait_stream(a)
    b.wait_stream(third)


def synchronize_stream(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    a.synchronize()


def synchronize_event(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    a.record_event().synchronize()


def query_event(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    assert a.record_event().query()


def query_stream(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    assert a.query()


def synchronize_device(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    torch.cuda.synchronize(DEVICE)


def item(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    with torch.cuda.stream(a):
        torch.zeros((), device=DEVICE).item()


def blocking_copy(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    with torch.cuda.stream(a):
        torch.zeros(2, device=DEVICE).cpu()


def nonzero(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    with torch.cuda.stream(a):
        torch.ones(2, device=DEVICE).nonzero()


WAYS = [wait_stream, wait_event, event_wait, by_a_third_stream, synchronize_stream, item,
        synchronize_event, query_event, query_stream, synchronize_device, blocking_copy,
        nonzero]  # fmt: skip


@pytest.mark.parametrize("wait", WAYS)
@pytest.mark.parametrize("write_first", [True, False])
def test_each_way_to_wait_makes_it_legal(
    kinds: Kinds,
    wait: Callable[[torch.cuda.Stream, torch.cuda.Stream], None],
    write_first: bool,
) -> None:
    a, b = streams()
    x = zeros()
    uses: list[Callable[[], torch.Tensor]] = [lambda: x.add_(1), lambda: x.sum()]
    with torch.cuda.stream(a):
        uses[not write_first]()
    wait(a, b)
    with torch.cuda.stream(b):
        uses[write_first]()
    assert kinds() == []


def nothing(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    pass


def an_event_before(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    b.wait_event(BEFORE.pop())


def an_event_that_was_never_recorded(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    b.wait_event(torch.cuda.Event())


def the_other_direction(a: torch.cuda.Stream, b: torch.cuda.Stream) -> None:
    a.wait_stream(b)


BEFORE: list[torch.cuda.Event] = []
NO_WAYS = [nothing, an_event_before, an_event_that_was_never_recorded, the_other_direction]


@pytest.mark.parametrize("wait", NO_WAYS)
def test_a_read_that_does_not_wait_for_a_write_is_a_race(
    kinds: Kinds, wait: Callable[[torch.cuda.Stream, torch.cuda.Stream], None]
) -> None:
    a, b = streams()
    x = zeros()
    BEFORE[:] = [a.record_event()]
    with torch.cuda.stream(a):
        x.add_(1)
    wait(a, b)
    with torch.cuda.stream(b):
        x.sum()
    assert kinds() == ["RACE"]


@pytest.mark.parametrize("side_writes", [True, False])
def test_streams_of_torch_do_not_wait_for_the_default_stream_nor_it_for_them(
    kinds: Kinds, side_writes: bool
) -> None:
    side, _ = streams()
    default = torch.cuda.default_stream(DEVICE)
    x = zeros()
    first, second = (side, default) if side_writes else (default, side)
    with torch.cuda.stream(first):
        x.add_(1)
    with torch.cuda.stream(second):
        x.sum()
    assert kinds() == ["RACE"]


def test_a_wait_in_one_thread_counts_for_all_threads(kinds: Kinds) -> None:
    # There is one host: what threads do to tell each other of it is not known here.
    a, b = streams()
    x = zeros()
    with torch.cuda.stream(a):
        x.add_(1)
    other = threading.Thread(target=a.synchronize)
    other.start()
    other.join()
    with torch.cuda.stream(b):
        x.sum()
    assert kinds() == []


# Views --------------------------------------------------------------------------------------------


Slice = Callable[[torch.Tensor], torch.Tensor]
DISJOINT: list[tuple[Slice, Slice]] = [
    (lambda x: x[:4], lambda x: x[4:]),
    (lambda x: x[:, :4], lambda x: x[:, 4:]),
    (lambda x: x[::2], lambda x: x[1::2]),
    (lambda x: x.chunk(2)[0], lambda x: x.chunk(2)[1]),
    (lambda x: x[0], lambda x: x.t()[1:, 1:]),
]
OVERLAPPING: list[tuple[Slice, Slice]] = [
    (lambda x: x[:5], lambda x: x[4:]),
    (lambda x: x[:, :5], lambda x: x[:, 4:]),
    (lambda x: x[::2], lambda x: x[2]),
    (lambda x: x.view(-1), lambda x: x[7, 7:]),
    (lambda x: x[0], lambda x: x.t()[:1]),
    (lambda x: x.detach(), lambda x: x.diagonal()),
]


@pytest.mark.parametrize(
    ("pair", "expected"),
    [*[(pair, set()) for pair in DISJOINT], *[(pair, {"RACE"}) for pair in OVERLAPPING]],
)
def test_slices_conflict_if_they_share_a_byte(
    kinds: Kinds, pair: tuple[Slice, Slice], expected: set[str]
) -> None:
    a, b = streams()
    x = torch.zeros(8, 8, device=DEVICE)
    torch.cuda.synchronize(DEVICE)
    for stream, view in zip((a, b), pair, strict=True):
        with torch.cuda.stream(stream):
            view(x).add_(1)
    assert set(kinds()) == expected
