"""Copies of a model in a pipe, made in each way that there is, are the plain model's copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import pipert


class WithState(nn.Linear):
    """Its state is no copy of its ``__dict__``, but contains it."""

    def __getstate__(self) -> Any:
        return {"all": [self.__dict__]}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state["all"][0])


class WithCopy(nn.Linear):
    """Is copied by itself, as parametrized modules are."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


class Recurrent(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[1](self[0](x)[0])
        return y


class Own(nn.Sequential):
    """The model has a state of its own."""

    __getstate__, __setstate__ = WithState.__getstate__, WithState.__setstate__


def two(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(4, 4))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: two(nn.Linear(4, 4)),
    "lstm": lambda: Recurrent(nn.LSTM(4, 4), nn.Linear(4, 4)),
    "gru": lambda: Recurrent(nn.GRU(4, 4), nn.Linear(4, 4)),
    "own state": lambda: two(WithState(4, 4)),
    "own copy": lambda: two(WithCopy(4, 4)),
    "parametrized": lambda: two(parametrizations.weight_norm(nn.Linear(4, 4))),
    "model with state": lambda: Own(nn.Linear(4, 4), nn.Linear(4, 4)),
    "traced": lambda: fx.symbolic_trace(two(nn.Linear(4, 4))),
}


def saved(model: nn.Module, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    classes: list[Any] = [nn.Sequential, nn.Linear, nn.LSTM, nn.GRU, Recurrent, WithState, Own, set]
    classes.append(WithCopy)
    with torch.serialization.safe_globals(classes):
        return torch.load(file, weights_only=weights_only)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of its layers": lambda model: copy.deepcopy([model, *model.children()])[0],
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": lambda model: saved(model, False),
    "save, weights only": lambda model: saved(model, True),
}


REFUSED_BY_TORCH = {("parametrized", way) for way in WAYS if "deepcopy" not in way}
REFUSED_BY_TORCH |= {("traced", "save, weights only")}


def guests(model: nn.Module) -> list[str]:
    """Names the attributes of a model's modules that are pipert's."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value).__module__.startswith("pipert.")
    ]


@pytest.mark.filterwarnings("ignore::pipert.NotBatchFirstWarning")
@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in KINDS for way in WAYS if (kind, way) not in REFUSED_BY_TORCH],
)
def test_a_copy_of_a_model_in_a_pipe_is_plain(kind: str, way: str) -> None:
    torch.manual_seed(0)
    model, x = KINDS[kind](), torch.randn(6, 2, 4)
    expected = model(x)
    with pipert.pipeline(model, ["1"], devices=["cpu"] * 2) as pipe:
        copied = WAYS[way](model)
        assert not guests(copied)
        torch.testing.assert_close(copied(x), expected)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        again = copy.deepcopy(copied)
        torch.testing.assert_close(again(x), expected)
        copied(x).sum().backward()
        assert pipe.statistics().runs == 0
    assert all(p.grad is None for p in (*model.parameters(), *again.parameters()))
    assert all(p.grad is not None for p in copied.parameters())


@pytest.mark.filterwarnings("ignore::pipert.NotBatchFirstWarning")
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"parametrized"}))
def test_a_shallow_copy_has_a_forward_and_layers_of_its_own(kind: str) -> None:
    torch.manual_seed(0)
    model, x = KINDS[kind](), torch.randn(6, 2, 4)
    with pipert.pipeline(model, ["1"], devices=["cpu"] * 2) as pipe:
        copied, layer = copy.copy(model), copy.copy(model.get_submodule("0"))
        assert not {type(v).__module__ for m in (copied, layer) for v in vars(m).values()} & {
            "pipert.layers.intercepted", "pipert.any_model.routed",
        }  # fmt: skip
        for call in (copied, copied.forward):
            call(x)
        assert pipe.statistics().runs == 0
