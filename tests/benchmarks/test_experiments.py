"""Tests the counts and predictions of the paper's experiments on small known cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchgpipe", reason="the experiments run torchgpipe beside pipert")
pytest.importorskip("tqdm", reason="the experiments show their progress with tqdm")

from _ablation import PARTS, only  # noqa: E402
from _layer_costs import Bytes, Times, layer_bytes, layer_times  # noqa: E402
from _memory import peaks  # noqa: E402
from _models import AMOEBANET, RESNET, UNET, Model, for_torchgpipe  # noqa: E402
from _paper import ABLATION, AMOEBANET_SPEED, UNET_MEMORY, UNET_SPEED, Setting  # noqa: E402
from _predict import Link, best_balance, calibrated, predict, transfers  # noqa: E402
from _simulator import Plan, Transfer, simulate  # noqa: E402
from torchgpipe import GPipe  # noqa: E402
from unet_ablation import timeline_of  # noqa: E402

from pipert import Pipe  # noqa: E402

MODELS = [UNET, AMOEBANET, RESNET]
FREE = Link(float("inf"), 0.0)


def no_bytes(layers: int, *, inputs: int = 0) -> Bytes:
    """Returns the bytes of layers that keep nothing."""
    some = [inputs] * layers
    return Bytes([0] * layers, some, some, [{} for _ in range(layers)], [])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_narrow_model_has_the_papers_layers(model: Model) -> None:
    with torch.device("meta"):
        narrow, wide = model.at_width(0.0625), model.at_width(1.0)
    assert [type(layer) for layer in narrow] == [type(layer) for layer in wide]


@pytest.mark.parametrize(
    ("settings", "layers"), [(UNET_SPEED, 241), (AMOEBANET_SPEED, 24), (ABLATION, 241)]
)
def test_a_balance_of_the_paper_takes_all_layers(
    settings: tuple[Setting, ...], layers: int
) -> None:
    assert {sum(setting.balance) for setting in settings} == {layers}


@pytest.mark.parametrize("setting", UNET_MEMORY, ids=lambda setting: setting.name)
def test_a_micro_batch_of_the_memory_table_is_whole(setting: Setting) -> None:
    assert setting.batch % setting.chunks == 0
    assert sum(setting.balance) == 21 + 44 * setting.model[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", [UNET, RESNET], ids=lambda model: model.name)
def test_the_model_for_torchgpipe_computes_the_same(model: Model) -> None:
    module = model.at_width(0.0625).eval()
    x = torch.rand(2, *model.image(0.0625))
    half = len(module) // 2
    balance = [half, len(module) - half]
    peer = GPipe(for_torchgpipe(module), balance, devices=["cpu"] * 2, chunks=2)
    with torch.no_grad(), Pipe(module, balance, devices=["cpu"] * 2, chunks=2) as pipe:
        torch.testing.assert_close(peer(x), pipe(x))


def test_bytes_of_a_linear_layer_are_its_weights_input_and_output() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(inplace=True))
        found = layer_bytes(module, torch.empty(1, 10))
    assert found.parameters == [800, 0]
    assert found.inputs == [40, 80]
    assert found.outputs == [80, 80]
    assert found.saved_by(range(0, 1)) == 40  # the weight is there anyway
    assert found.saved_by(range(0, 2)) == 40 + 80  # its result


def test_a_storage_that_two_layers_save_counts_once_in_a_partition() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Sigmoid(), nn.Linear(10, 10))
        found = layer_bytes(module, torch.empty(1, 10, requires_grad=True))
    assert found.saved_by(range(0, 1)) == found.saved_by(range(1, 2)) == 40
    assert found.saved_by(range(0, 2)) == 40


def test_skips_are_found_with_their_bytes() -> None:
    with torch.device("meta"):
        model = UNET.at_width(0.0625)
        found = layer_bytes(model, torch.empty(1, 3, 64, 64))
    assert [skip.bytes for skip in found.skips] == [
        # Of the deepest level first: 64 channels of 4 x 4, and so on up to 4 of 64 x 64.
        *(4 * 64 * 4**2, 4 * 32 * 8**2, 4 * 16 * 16**2, 4 * 8 * 32**2, 4 * 4 * 64**2),
    ]


def test_seconds_are_those_of_one_sample() -> None:
    calls = []

    class Note(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return x

    layers = nn.Sequential(nn.Linear(4, 4), Note())
    found = layer_times(layers, torch.zeros(8, 4), torch.device("cpu"), 1, lambda: None)
    assert len(found.forward) == len(found.backward) == 2
    assert found.forward[0] > 0
    assert set(calls) == {8}


def test_a_skip_inside_a_partition_is_no_transfer() -> None:
    sizes = no_bytes(4, inputs=8)
    sizes.skips.extend([Transfer(0, 1, 100), Transfer(0, 3, 100)])
    assert transfers(sizes, [2, 2], 3) == [Transfer(0, 1, 24), Transfer(0, 1, 300)]


def test_recomputed_layers_count_their_forward_twice_in_the_balance() -> None:
    times = Times([4.0, 1.0, 1.0, 1.0], [0.0, 3.0, 3.0, 0.0])
    assert best_balance(times, Setting("", 2, 4, 1, checkpoint="never")) == (2, 2)
    assert best_balance(times, Setting("", 2, 4, 1, checkpoint="always")) == (1, 3)


def test_a_prediction_with_free_copies_is_the_clocks_times_the_slowest_partition() -> None:
    times = Times([0.5] * 4, [1.0] * 4)
    setting = Setting("", 2, 16, 4, checkpoint="always")
    found = predict(setting, [2, 2], times, no_bytes(4), FREE, speed=2.0)
    task = 4 * 2 / 2  # samples of a micro-batch, layers, speed
    # On the first device: wait for F, R and B of micro-batch 3 on the other, then all.
    assert found.simulation.seconds == pytest.approx(task * (4 * 0.5 + 0.5 + 1.5 + 4 * 1.5))
    assert found.throughput == pytest.approx(16 / found.simulation.seconds)


def test_calibration_finds_the_speed_in_spite_of_copies_that_keep_theirs() -> None:
    times, setting = Times([0.5] * 4, [1.0] * 4), Setting("", 2, 16, 4)
    sizes, link = no_bytes(4, inputs=100), Link(1e4, 1e-3)
    speed = calibrated(setting, 20.0, times, sizes, link)
    balance = best_balance(times, setting)
    again = predict(setting, balance, times, sizes, link, speed=speed)
    assert again.throughput == pytest.approx(20.0, rel=1e-5)


def test_calibration_refuses_a_bandwidth_too_small_for_the_measured_time() -> None:
    times, setting = Times([0.5] * 4, [1.0] * 4), Setting("", 2, 16, 4)
    with pytest.raises(ValueError, match="larger --bandwidth"):
        calibrated(setting, 1e6, times, no_bytes(4, inputs=100), Link(1e4, 1e-3))


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (0, 4 * 10 + 100 + 4 * 5),  # never: what all micro-batches save
        (4, 10 + 100 + 5 + 3 * 5),  # always: one at a time, but each of the outputs
    ],
)
def test_peak_of_one_device(kept: int, expected: float) -> None:
    one = lambda i, j: 1.0  # noqa: E731
    found = simulate(Plan(4, 1, one, one, one, kept))
    sizes = Bytes([50], [0], [0], [{0: 10}], [])
    sizes.outputs[0] = 0
    (peak,) = peaks(found, sizes, [1], 1, 2.0)
    assert peak == expected - 4 * 5


def test_a_simulation_reports_its_bubble_as_a_recording_does() -> None:
    one = lambda i, j: 1.0  # noqa: E731
    found = simulate(Plan(4, 3, one, one, one, 3, [Transfer(0, 1, 8), Transfer(1, 2, 8)]))
    assert timeline_of(found).report().bubble == pytest.approx(found.bubble)


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu"] * 3,
        pytest.param(["cuda:0", "cuda:1", "cuda:0"], marks=[pytest.mark.multi_gpu]),
    ],
    ids=["cpu", "cuda"],
)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_micro_batches_go_back_in_reverse_order_even_without_fork_and_join(
    checkpoint: str, devices: list[str]
) -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    layers.append(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))))  # one with more nodes
    pipe = Pipe(layers, [1, 1, 2], devices=devices, chunks=5, checkpoint=checkpoint)
    with pipe, only(pipe, PARTS["clock only"]):
        with pipe.record() as timeline:
            pipe(torch.rand(5, 2)).sum().backward()
    for j in range(3):
        backwards = [e for e in timeline.events if (e.kind, e.partition) == ("backward", j)]
        order = [event.micro_batch for event in backwards]
        assert order == sorted(order, reverse=True)
        assert {*order} == {*range(5)}
