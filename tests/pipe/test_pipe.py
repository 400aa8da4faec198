"""Tests ``Pipe`` as a module: its errors, and what it shares with the Sequential."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert import Pipe, PipertError

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault

ANY: Any = None  # what a caller without a type checker may pass


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4), nn.Linear(4, 1))


def made(module: Any = ANY, balance: Any = (1, 3), **options: Any) -> Pipe:
    options.setdefault("devices", ["cpu"] * 2)
    return Pipe(layers() if module is None else module, balance, **options)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with made(chunks=2) as pipe:
        yield pipe


class Grows(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x


# The table of errors in PEERS.md: what must hold, what was given, what to change.


BAD_BALANCES = [[0, 4], [-1, 5], [4, 0]]
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"balance": None}, ValueError, "balance is required.*balance_by_time"),
    ({"balance": "22"}, TypeError, r"such as \[2, 2\], got '22'"),
    ({"balance": 4}, TypeError, "balance"),
    *[
        ({"balance": [1, entry]}, TypeError, f"entry of balance must be an int, got {entry!r}")
        for entry in ("two", "3", None, 1.5, 3.0)
    ],
    *[
        ({"balance": bad}, ValueError, f"balance must be positive.*{re.escape(str(bad))}")
        for bad in BAD_BALANCES
    ],
    ({"balance": [1, 2]}, ValueError, r"add up to .*\[1, 2\] adds up to 3 and the module has 4"),
    ({"balance": [3, 3]}, ValueError, r"add up to .*\[3, 3\] adds up to 6 and the module has 4"),
    ({"chunks": 0}, ValueError, "chunks must be a positive number.*got 0"),
    ({"chunks": -1}, ValueError, "chunks must be a positive number.*got -1"),
    ({"checkpoint": "sometimes"}, ValueError,
     "'always', 'except_last', 'never'.*got 'sometimes'"),
    ({"module": nn.Linear(1, 1)}, TypeError,
     "an nn.Sequential, got Linear; use pipert.pipeline.*or put the layers"),
    ({"module": Grows(nn.ReLU())}, TypeError,
     "Grows overrides forward.*make what it does a layer"),
    ({"devices": ["cpu"]}, IndexError, r"devices \['cpu'\].*devices=\['cpu', 'cpu'\]"),
    ({"devices": ["cpu", "cpu", "cpu:7"]}, ValueError, r"leave out \['cpu:7'\]"),
    ({"devices": "cpu"}, TypeError, r"got 'cpu'; write devices=\['cpu'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG)
def test_a_wrong_argument_is_refused_with_a_remedy(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        made(**arguments)


@pytest.mark.parametrize("chunks", ["auto", "2", 2.5, 2.0, None])
def test_chunks_that_are_no_int_are_refused(chunks: Any) -> None:
    message = f"chunks must be an int, got {chunks!r}"
    with pytest.raises(TypeError, match=message):
        made(chunks=chunks)
    with made(chunks=2) as pipe:
        with pytest.raises(TypeError, match=message):
            pipe.chunks = chunks
        assert pipe.chunks == 2


def test_module_must_not_be_a_pipe() -> None:
    with made() as pipe:
        with pytest.raises(TypeError, match="a pipe already; make another one of"):
            Pipe(pipe, [1])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a pipe already; make another one of"):
            pipert.pipeline(pipe, [])


def test_errors_of_state_are_runtime_errors_of_one_base() -> None:
    errors = [
        getattr(pipert, name)
        for name in pipert.__all__
        if isinstance(getattr(pipert, name), type) and name.endswith("Error")
    ]
    assert all(issubclass(error, PipertError) for error in errors)
    assert issubclass(PipertError, RuntimeError)


# It reads like the Sequential.


@pytest.mark.parametrize(
    "part", [slice(1, 3), slice(-2, None), slice(None), slice(0, 4, 2)], ids=str
)
def test_a_slice_has_the_layers_of_the_modules_slice(part: slice) -> None:
    module = layers()
    with made(module) as pipe:
        assert list(pipe[part].named_children()) == list(module[part].named_children())


def test_repr_shows_partitions_and_layers(pipe: Pipe) -> None:
    assert repr(pipe).splitlines() == [
        "Pipe(chunks=2, checkpoint='never'",
        "  partition 0 on cpu:",
        "    (0): Linear(in_features=2, out_features=3, bias=True)",
        "  partition 1 on cpu:",
        "    (1): Tanh()",
        "    (2): Linear(in_features=3, out_features=4, bias=True)",
        "    (3): Linear(in_features=4, out_features=1, bias=True)",
        ")",
    ]


# to, half, train.


@pytest.mark.parametrize("mode", [True, False])
def test_train_reaches_layers_and_partitions(pipe: Pipe, mode: bool) -> None:
    pipe.train(not mode)
    pipe.train(mode)
    modules = [pipe, *pipe, *pipe.partitions]
    assert {module.training for module in modules} == {mode}


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.to(torch.float64), lambda m: m.double(), lambda m: m.to("cpu", torch.float64)],
    ids=["to(dtype)", "double", "to(device, dtype)"],
)
def test_dtype_may_be_changed(pipe: Pipe, convert: Callable[[Pipe], Pipe]) -> None:
    assert convert(pipe)(torch.ones(4, 2, dtype=torch.float64)).dtype == torch.float64


MOVES: dict[str, Callable[[Pipe], Any]] = {
    "to": lambda pipe: pipe.to("meta"),
    "to a tensor's": lambda pipe: pipe.to(torch.empty(0, device="meta")),
    "to with dtype": lambda pipe: pipe.to("meta", torch.float64),
    "to_empty": lambda pipe: pipe.to_empty(device="meta"),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_pitfall_26_move_to_another_device_is_refused_with_the_remedy_and_leaves_everything(
    pipe: Pipe, move: Callable[[Pipe], Any]
) -> None:
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with pytest.raises(RuntimeError, match="cannot be moved to meta; make a new Pipe"):
        move(pipe)
    same(dict(pipe.state_dict()), before)


@pytest.mark.cuda
def test_pitfall_26_cuda_is_refused_with_the_remedy(pipe: Pipe) -> None:
    with pytest.raises(RuntimeError, match="cannot be moved to cuda:0; make a new Pipe"):
        pipe.cuda()


# Pitfall 26: hooks, and an optimizer that is older than the pipe.


def once(calls: list[Any]) -> Callable[..., None]:
    return lambda *args: calls.append(args)


HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward_pre": lambda m, calls: m.register_forward_pre_hook(once(calls)),
    "forward": lambda m, calls: m.register_forward_hook(once(calls)),
    "forward with kwargs": lambda m, calls: m.register_forward_hook(once(calls), with_kwargs=True),
    "forward always": lambda m, calls: m.register_forward_hook(once(calls), always_call=True),
    "full_backward": lambda m, calls: m.register_full_backward_hook(once(calls)),
    "full_backward_pre": lambda m, calls: m.register_full_backward_pre_hook(once(calls)),
}


def train_once(pipe: nn.Module) -> None:
    pipe(torch.ones(4, 2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("register", HOOKS.values(), ids=list(HOOKS))
def test_pitfall_26_hooks_set_before_wrapping_and_on_the_pipe_fire_once(
    register: Callable[[nn.Module, list[Any]], Any],
) -> None:
    module, before, after = layers(), list[Any](), list[Any]()
    register(module, before)
    with made(module, chunks=2) as pipe:
        register(pipe, after)
        train_once(pipe)
    assert len(before) == len(after) == 1


def test_pitfall_26_backward_hook_sees_the_gradients_of_the_whole_batch() -> None:
    module, calls = layers(), list[Any]()
    module.register_full_backward_hook(once(calls))
    with made(module, chunks=2) as pipe:
        train_once(pipe)
    assert [[grads[0].shape for grads in call[1:]] for call in calls] == [[(4, 2), (4, 1)]]


# Pitfall 25: copies of a pipe that has run.


def by_deepcopy(pipe: Pipe) -> Pipe:
    return copy.deepcopy(pipe)


def by_pickle(pipe: Pipe) -> Pipe:
    loaded: Pipe = pickle.loads(pickle.dumps(pipe))
    return loaded


def by_torch_save(pipe: Pipe) -> Pipe:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    loaded: Pipe = torch.load(file, weights_only=False)
    return loaded


COPIES = pytest.mark.parametrize("duplicate", [by_deepcopy, by_pickle, by_torch_save])


@COPIES
def test_pitfall_25_copy_of_a_live_pipe_has_its_settings_and_computes_the_same(
    duplicate: Callable[[Pipe], Pipe],
) -> None:
    x = torch.ones(4, 2)
    with made(chunks=3, checkpoint="always") as pipe:
        expected = pipe(x)
        with duplicate(pipe) as other:
            same(other(x), expected)
            settings = (other.balance, other.devices, other.chunks, other.checkpoint)
            assert settings == (pipe.balance, pipe.devices, 3, "always")
            layers_of_partitions = [layer for partition in other.partitions for layer in partition]
            assert layers_of_partitions == list(other.children())


@COPIES
def test_pitfall_25_copy_of_a_closed_pipe_is_open(duplicate: Callable[[Pipe], Pipe]) -> None:
    pipe = made()
    pipe.close()
    with duplicate(pipe) as other:
        assert other(torch.ones(4, 2)).shape == (4, 1)


# Pitfall 28: wrapping disturbs nothing.


class Spy(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_pitfall_28_wrapping_calls_no_layer_and_leaves_parameters_and_the_random_state() -> None:
    spy = Spy()
    module = nn.Sequential(spy, *layers())
    before = [parameter.data_ptr() for parameter in module.parameters()], torch.get_rng_state()
    with made(module, [1, 4]):
        assert spy.calls == 0 and torch.equal(torch.get_rng_state(), before[1])
        assert [parameter.data_ptr() for parameter in module.parameters()] == before[0]


# After it is closed.


def test_module_may_be_wrapped_again() -> None:
    module = layers()
    made(module).close()
    with made(module, [2, 2]) as pipe:
        assert pipe(torch.ones(4, 2)).shape == (4, 1)


def test_module_may_be_in_two_pipes_at_once() -> None:
    module, x = layers(), torch.ones(4, 2)
    with made(module) as pipe, made(module, [2, 2]) as other:
        same(pipe(x), other(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe: setattr(pipe, "0", nn.ReLU()),
        lambda pipe: setattr(pipe, "0", None),
        lambda pipe: setattr(pipe, "0", nn.Parameter(torch.ones(1))),
        lambda pipe: setattr(pipe, "extra", nn.ReLU()),
        lambda pipe: delattr(pipe, "0"),
        lambda pipe: pipe.add_module("0", None),
        lambda pipe: pipe.register_module("extra", nn.ReLU()),
        lambda pipe: pipe.__setitem__(-4, nn.ReLU()),
    ],
    ids=["set", "none", "parameter", "new", "deleted", "added none", "added", "by index"],
)
def test_layers_cannot_be_changed(change: Callable[[Pipe], None], pipe: Pipe) -> None:
    """They would be listed in ``parameters()`` and not computed, or the other way round."""
    before = [*pipe.named_children()]
    with pytest.raises(ValueError, match="cannot be set.* close the pipe, change the module"):
        change(pipe)
    assert [*pipe.named_children()] == before


def test_a_layer_may_be_set_to_itself(pipe: Pipe) -> None:
    """Functions that convert modules set all of them, changed or not."""
    pipe[0] = pipe[0]
    nn.SyncBatchNorm.convert_sync_batchnorm(pipe)  # type: ignore[no-untyped-call]
