"""Tests the counts and predictions of the paper's experiments on small known cases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torchgpipe", reason="the experiments run torchgpipe beside pipert")
pytest.importorskip("tqdm", reason="the experiments show their progress with tqdm")

from _layer_costs import Bytes, Times, layer_bytes  # noqa: E402
from _memory import peaks  # noqa: E402
from _models import AMOEBANET, RESNET, UNET, Model, for_torchgpipe  # noqa: E402
from _paper import ABLATION, AMOEBANET_SPEED, UNET_SPEED, Setting  # noqa: E402
from _predict import Link, predict  # noqa: E402
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


def test_skips_are_found_with_their_bytes() -> None:
    with torch.device("meta"):
        model = UNET.at_width(0.0625)
        found = layer_bytes(model, torch.empty(1, 3, 64, 64))
    assert [skip.bytes for skip in found.skips] == [
        # Of the deepest level first: 64 channels of 4 x 4, and so on up to 4 of 64 x 64.
        *(4 * 64 * 4**2, 4 * 32 * 8**2, 4 * 16 * 16**2, 4 * 8 * 32**2, 4 * 4 * 64**2),
    ]


def test_a_prediction_with_free_copies_is_the_clocks_times_the_slowest_partition() -> None:
    times = Times([0.5] * 4, [1.0] * 4)
    setting = Setting("", 2, 16, 4, checkpoint="always")
    found = predict(setting, [2, 2], times, no_bytes(4), FREE, speed=2.0)
    task = 4 * 2 / 2  # samples of a micro-batch, layers, speed
    # On the first device: wait for F, R and B of micro-batch 3 on the other, then all.
    assert found.simulation.seconds == pytest.approx(task * (4 * 0.5 + 0.5 + 1.5 + 4 * 1.5))
    assert found.throughput == pytest.approx(16 / found.simulation.seconds)


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
