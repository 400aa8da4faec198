"""Tests that measuring leaves the module untouched, and runs each layer on its real input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import weight_norm

from pipert.balance import Arguments, balance_by_size, balance_by_time, layer_sizes, layer_times
from pipert.balance.calls import measure_layers
from pipert.balance.measure import measure_all
from pipert.skip import pop, skippable, stash
from tests.layers import Apply


def measure(module: nn.Sequential, sample: Any) -> Any:
    """Measures times and sizes."""
    return measure_layers(module, sample, None, measure_all)


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 2)
    )


# What is as before --------------------------------------------------------------------------------


def test_measuring_leaves_a_table_that_its_lookups_change_unchanged() -> None:
    module = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 2))
    before = [parameter.clone() for parameter in module.parameters()]
    measure(module, torch.arange(4))
    assert all(map(torch.equal, module.parameters(), before))


def test_measuring_leaves_the_sample_unchanged() -> None:
    example = torch.ones(2, requires_grad=True)
    measure(nn.Sequential(Apply(lambda x: x.mul_(2)), Apply(lambda x: x.add_(1))), example)
    assert example.tolist() == [1, 1] and example.grad is None and example.requires_grad


def test_forward_hooks_run_and_objects_they_belong_to_are_not_copied() -> None:
    class Owner:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # which cannot be copied
            self.seen: set[str] = set()

        def see(self, module: nn.Module, args: Any, output: Any) -> None:
            self.seen.add(type(module).__name__)

    module, owner = model(), Owner()
    module[0].register_forward_hook(owner.see)
    module[1].register_full_backward_hook(owner.see)
    measure(module, torch.randn(6, 3))
    assert owner.seen == {"Linear"}


def test_no_weight_stays_alive_under_autocast() -> None:
    weights: list[Any] = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            storage = self.weight.untyped_storage()
            weights.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            return super().forward(x)

    with torch.autocast("cpu", torch.bfloat16):
        measure(nn.Sequential(Seen(2, 2), Seen(2, 2)), torch.ones(3, 2))
        assert weights and all(weight.expired() for weight in weights)


# What can be measured -----------------------------------------------------------------------------


@skippable(stash=["a", "b"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("a", {"twice": 2 * x, "none": None})
        yield stash("b", 3)
        return x


@skippable(pop=["a", "b"])
class PopAll(nn.Module):
    def forward(self, x: Tensor) -> Generator[pop, Any, Tensor]:
        a = yield pop("a")
        b = yield pop("b")
        self.got = (a, b)
        y: Tensor = x + a["twice"] + b
        return y


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        y: Tensor = self.last
        return y


def called(layer: nn.Module) -> nn.Module:
    layer(torch.ones(2, 3))
    return layer


Layers = tuple[list[nn.Module], Any]
LAYERS: dict[str, Callable[[], Layers]] = {
    "in-place layers": lambda: ([nn.Linear(3, 3), nn.ReLU(True), nn.ReLU(True)], torch.ones(2, 3)),
    "integer inputs": lambda: ([nn.Embedding(5, 3), nn.Linear(3, 3)], torch.tensor([[1, 2]])),
    "sparse gradients": lambda: ([nn.Embedding(5, 3, sparse=True)], torch.tensor([[1, 2]])),
    "pytrees": lambda: (
        [Apply(lambda x: {"a": x, "b": [None, 3, x * 2]}), Apply(lambda v: v["b"][2])],
        (torch.ones(2, 3, requires_grad=True), "text"),
    ),
    "skips": lambda: ([nn.Linear(3, 3), Stash(), nn.ReLU(True), PopAll()], torch.ones(2, 3)),
    "frozen layers": lambda: ([nn.Linear(3, 3).requires_grad_(False)] * 2, torch.ones(2, 3)),
    "tied layers": lambda: ([layer := nn.Linear(3, 3), layer], torch.ones(2, 3)),
    "old weight norm": lambda: ([called(weight_norm(nn.Linear(3, 3)))], torch.ones(2, 3)),
    "a layer that keeps its output": lambda: ([called(Keeping())], torch.ones(2, 3)),
    "no layers": lambda: ([], torch.ones(1)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("case", LAYERS)
def test_each_layer_has_one_measure(case: str) -> None:
    layers, example = LAYERS[case]()
    if case == "pytrees":
        layers = [Apply(lambda v: v[0]), *layers]
    assert len(measure(nn.Sequential(*layers), example)) == len(layers)


def test_several_arguments_are_wrapped_up() -> None:
    def first(x: Tensor, *, scale: Tensor) -> Tensor:
        return x * scale

    example = Arguments((torch.ones(4, 2),), {"scale": torch.ones(4, 1)})
    assert len(measure(nn.Sequential(Apply(first), nn.Linear(2, 2)), example)) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode: Any) -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(x.requires_grad)
        return x

    with mode():
        measure(nn.Sequential(nn.Linear(2, 2), Apply(look)), torch.ones(3, 2))
        assert not torch.is_grad_enabled()
    assert set(seen) == {True}


# What cannot --------------------------------------------------------------------------------------


def fail(x: Tensor) -> Tensor:
    raise ValueError("as told")


def test_a_layer_that_cannot_be_copied_is_answered_with_a_remedy() -> None:
    layer = nn.ReLU()
    layer.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="lock") as caught:
        measure(nn.Sequential(layer), torch.ones(2))
    assert "balance_by_cost" in caught.value.__notes__[0]


def test_a_module_without_values_is_measured_as_one_with_them() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    sizes = layer_sizes(module, torch.ones(2, 2))
    assert layer_sizes(module.to("meta"), torch.ones(2, 2)) == sizes
    assert min(layer_times(module, torch.ones(2, 2), timeout=0)) > 0


def test_a_lazy_layer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'0.weight' is not initialised"):
        measure(nn.Sequential(nn.LazyLinear(2)), torch.ones(2, 2))


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_more_partitions_than_layers_are_refused_before_anything_runs(balance: Any) -> None:
    with pytest.raises(ValueError, match="3 partitions and 2 layers"):
        balance(3, nn.Sequential(Apply(fail), Apply(fail)), torch.ones(2))


@pytest.mark.cuda
def test_layers_are_measured_on_the_gpu_and_the_module_stays_where_it_is() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        return x

    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), Apply(look))
    state = torch.cuda.get_rng_state()
    measure(module, torch.ones(3, 2))
    assert set(seen) == {"cuda"} and module[0].weight.device.type == "cpu"
    assert torch.equal(torch.cuda.get_rng_state(), state)
