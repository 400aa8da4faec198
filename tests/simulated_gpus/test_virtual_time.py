"""Virtual time: what overlaps, what waits, what a link and the host cost."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.simulated_gpus.simulation import Simulation

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda:0")
SLEEP = 100.0  # microseconds


def sleep() -> None:
    sleep_for_cycles: Callable[[int], None] = torch.cuda._sleep
    sleep_for_cycles(int(SLEEP * 2000))


def begin(gpus: Simulation, *, launch: float = 0, host: float = 0) -> None:
    """Time zero, on devices that move a byte, and do a thousand operations, in a nanosecond."""
    gpus.rates(launch_us=launch, memory_gbps=1, link_gbps=1, tflops=1, host_us=host)
    gpus.reset_time()


@pytest.mark.parametrize(("waits", "expected"), [(False, SLEEP), (True, 2 * SLEEP)])
def test_two_streams_overlap_until_one_waits(
    gpus: Simulation, waits: bool, expected: float
) -> None:
    begin(gpus)
    side = torch.cuda.Stream(DEVICE)
    sleep()
    if waits:
        side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        sleep()
    assert gpus.makespan() == expected


def test_operations_after_a_synchronisation_begin_after_it_on_every_device(
    gpus: Simulation
) -> None:
    begin(gpus)
    sleep()
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.device(1):
        sleep()
    assert gpus.time(1) == 2 * SLEEP


def test_an_operation_takes_the_longer_one_of_its_bytes_and_its_flops(gpus: Simulation) -> None:
    x = torch.ones(100, 100, device=DEVICE)
    begin(gpus, launch=7)
    x.add_(1)  # reads and writes 40,000 bytes; those that it writes count twice
    assert gpus.time(0) == pytest.approx(7 + 80)
    begin(gpus)
    gpus.rates(launch_us=0, memory_gbps=1e6, link_gbps=1, tflops=1)
    x @ x
    assert gpus.time(0) == pytest.approx(2 * 100**3 / 1e6)


def flops(gpus: Simulation, compute: Callable[[], object]) -> float:
    gpus.rates(launch_us=0, memory_gbps=1e9, link_gbps=1, tflops=1e-3)
    gpus.reset_time()
    compute()
    return gpus.time(0) * 1e3


def test_flops_of_convolutions_forward_and_backward(gpus: Simulation) -> None:
    x = torch.ones(2, 4, 8, 8, device=DEVICE, requires_grad=True)
    w = torch.ones(6, 4, 3, 3, device=DEVICE, requires_grad=True)
    once = 2 * (2 * 6 * 6 * 6) * 4 * 3 * 3
    assert flops(gpus, lambda: F.conv2d(x, w)) == pytest.approx(once, rel=1e-3)
    y = F.conv2d(x, w)
    backward = flops(gpus, lambda: y.backward(torch.ones_like(y)))
    assert backward == pytest.approx(2 * once, rel=1e-2)
    depthwise = torch.ones(4, 1, 3, 3, device=DEVICE)
    grouped = flops(gpus, lambda: F.conv2d(x, depthwise, groups=4))
    assert grouped == pytest.approx(2 * (2 * 4 * 6 * 6) * 9, rel=1e-3)
    turned = flops(gpus, lambda: F.conv_transpose2d(x, w.new_ones(4, 6, 3, 3)))
    assert turned == pytest.approx(2 * x.numel() * 6 * 9, rel=1e-2)


def test_flops_of_products_and_attention(gpus: Simulation) -> None:
    a, b = torch.ones(3, 5, 7, device=DEVICE), torch.ones(3, 7, 4, device=DEVICE)
    once = 2 * 3 * 5 * 7 * 4
    assert flops(gpus, lambda: a @ b) == pytest.approx(once, rel=1e-3)
    assert flops(gpus, lambda: torch.baddbmm(a @ b, a, b)) == pytest.approx(2 * once, rel=1e-3)
    linear = flops(gpus, lambda: F.linear(a[0], b[0].t(), b[0, 0]))
    assert linear == pytest.approx(once / 3, rel=1e-2)
    q = torch.ones(1, 2, 16, 8, device=DEVICE)
    attention = flops(gpus, lambda: F.scaled_dot_product_attention(q, q, q))
    assert attention == pytest.approx(2 * (2 * 2 * 16 * 16 * 8), rel=1e-2)


@pytest.mark.multi_gpu
def test_a_link_carries_one_copy_after_the_other_in_each_direction(gpus: Simulation) -> None:
    x = {d: torch.ones(250, device=f"cuda:{d}") for d in range(3)}  # a microsecond over a link
    torch.cuda.synchronize()

    def copy(source: int, target: int) -> None:
        side = torch.cuda.Stream(source)
        with torch.cuda.stream(side), torch.cuda.stream(torch.cuda.Stream(target)):
            x[source].to(f"cuda:{target}", non_blocking=True)

    for copies, expected in (
        ([(0, 1)], 1),
        ([(0, 1), (0, 1)], 2),  # one link
        ([(0, 1), (0, 2)], 2),  # one way out
        ([(1, 0), (2, 0)], 2),  # one way in
        ([(0, 1), (1, 0)], 1),  # two directions
        ([(0, 1), (2, 0)], 1),
    ):
        begin(gpus)
        for source, target in copies:
            copy(source, target)
        assert gpus.makespan() == expected, copies
    gpus.clear()  # the targets' memory was made on streams that nobody waits for


def test_a_copy_overlaps_with_computing_on_another_stream(gpus: Simulation) -> None:
    x = torch.ones(25000, device=DEVICE)
    begin(gpus)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        x.to("cuda:1", non_blocking=True)
    sleep()
    assert gpus.makespan() == 100


def test_a_launch_costs_the_host_and_nothing_begins_before_it(gpus: Simulation) -> None:
    x = torch.ones(1, device=DEVICE)
    begin(gpus, host=10)
    for _ in range(3):
        x.add_(1)
    assert gpus.host_time() == 30
    assert gpus.time(0) == pytest.approx(30, abs=0.1)


def test_events_measure_virtual_time(gpus: Simulation) -> None:
    begin(gpus)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    sleep()
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == SLEEP / 1e3
