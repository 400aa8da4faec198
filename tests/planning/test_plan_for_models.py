"""Tests the search for a step of a model that is cut, whose own forward runs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import pipeline, plan_for
from pipert.balance.calls import measure_calls, measure_layers
from pipert.balance.measure import Cost, joined, measure_all, total, without
from pipert.batch.microbatch import Arguments

CPU = torch.device("cpu")
WIDTH = 16


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each measured task take a millisecond, so that balances are the same in each run."""
    ticks = itertools.count()
    for where in ("measure", "calls"):
        monkeypatch.setattr(f"pipert.balance.{where}.now", lambda _: next(ticks) / 1000)


class Model(nn.Module):
    """Calls an embedding and blocks, and computes its loss, if it gets labels."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)
        ])
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.embed = nn.Embedding(7, WIDTH)

    def forward(self, tokens: Tensor, *, scale: float = 1.0, labels: Any = None) -> Any:
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x * scale)
        return x if labels is None else (x - labels).square().mean()


def batch(rows: int = 32) -> dict[str, Any]:
    return {"tokens": torch.randint(7, (rows,)), "scale": 1.5, "labels": torch.randn(rows, WIDTH)}


def own_loss(loss: Tensor, _: object) -> Tensor:
    return loss


def test_each_candidate_runs_as_it_is() -> None:
    model, example = Model(), batch()
    state = copy.deepcopy(model.state_dict())
    found = plan_for(
        model, example, loss_fn=own_loss, memory="1GiB", devices=["cpu", "cpu"], chunks=[2, 4],
        best=1000,
    )  # fmt: skip
    assert {each.schedule for each in found} == {
        "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v"
    }  # fmt: skip
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for each in found[:: len(found) // 8]:
        assert sum(each.balance) == 5 and each.cuts is not None
        assert len(each.cuts) == len(each.balance) - 1 == len(each.devices) - 1
        with pipeline(
            Model(), each.cuts, devices=each.devices, chunks=each.chunks,
            checkpoint=each.checkpoint,
        ) as pipe:  # fmt: skip
            pipe.forward_backward(**example, loss_fn=own_loss, schedule=each.schedule)


def test_the_line_to_paste_names_the_cuts() -> None:
    found = plan_for(Model(2), batch(), memory="1GiB", devices=["cpu"], chunks=[2], best=1)
    assert found[0].line.startswith("pipe = pipeline(model, [], devices=['cpu:0'], chunks=2, ")
    (best,) = plan_for(
        Model(2), batch(), memory="1GiB", devices=["cpu", "cpu"], chunks=[32], best=1
    )
    assert best.cuts is not None and f"pipeline(model, {[*best.cuts]}, devices=" in best.line


def test_a_loss_function_gets_the_output_and_one_micro_batch_of_the_target() -> None:
    seen: list[tuple[int, int]] = []

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        seen.append((len(y), len(target)))
        return (y - target).square().mean()

    options: Any = {"memory": "1GiB", "devices": ["cpu", "cpu"], "chunks": [4]}
    tokens = torch.randint(7, (32,))
    plan_for(Model(), tokens, target=torch.randn(32, WIDTH), loss_fn=loss_fn, **options)
    assert {*seen} == {(8, 8)}


def costs(model: nn.Module, begins: Sequence[str], x: Tensor | None = None) -> list[Cost]:
    example = Arguments((torch.randint(7, (8,)) if x is None else x,))
    layers = {name: model.get_submodule(name) for name in begins}
    found = measure_calls(model, layers, begins, example, CPU, measure_all)
    assert [*found] == [*begins]
    return [*found.values()]


def test_blocks_cost_as_much_as_the_same_layers_in_a_sequential() -> None:
    """And the code between them makes what it multiplies."""
    model, x = Model(2), torch.randn(8, WIDTH, requires_grad=True)
    embed, first, second = costs(model, ["embed", "blocks.0", "blocks.1"])
    (alone,) = measure_layers(nn.Sequential(model.blocks[0]), x, CPU, measure_all).values()
    for block in (first, second):
        assert block.deferred == alone.deferred and block.forward > 0
        for name in ("parameters", "trained", "saved"):
            assert total(getattr(block, name)) == total(getattr(alone, name))
    assert total(embed.parameters) == total(embed.trained) == 4 * (7 + 1) * WIDTH  # and the shift
    both = joined([first, second])
    assert total(both.kept) == 0 and total(both.inputs) == total(alone.inputs)
    assert first.inputs.keys() <= embed.outputs.keys()


def test_what_own_code_saves_counts_once() -> None:
    """Neither what a layer gives or gets, nor what is saved already."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.a(tokens)
            y = self.b(x.exp() * x)  # saves the exponential, and x that is an output
            return torch.tanh(y).sum()  # saves its own output

    a, b = costs(Own(), ["a", "b"])
    one = 4 * 8 * WIDTH
    tokens = 8 * 8
    assert total(a.saved) == tokens + 2 * one  # the tokens, x and its exponential
    assert total(b.saved) == 2 * one  # its input and the output of tanh
    assert a.outputs.keys() > b.inputs.keys()


class Masked(nn.Module):
    """Gives all layers one mask, and multiplies by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Masks() for _ in range(3))
        self.head = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(100, WIDTH)[: len(x)]
        for layer in (self.a, self.b, self.c):
            x = layer(x, mask)
        return x @ self.head


class Masks(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


def test_what_own_code_saves_is_not_recomputed_and_weights_are_kept_anyway() -> None:
    row = 4 * WIDTH
    a, b, c = costs(Masked(), "abc", torch.randn(8, WIDTH))
    assert total(a.kept) == total(b.kept) == 0 and total(b.inputs) == (8 + 8) * row
    assert total(c.kept) == total(joined([b, c]).kept) == 8 * row  # the last output, and no weight


def test_tied_parameters_count_once() -> None:
    model = Model(2)
    first_linear, second_linear = (model.get_submodule(f"blocks.{k}.0") for k in (0, 1))
    second_linear.weight = first_linear.weight
    _, *both = costs(model, ["embed", "blocks.0", "blocks.1"])
    assert total(joined(both).trained) == 4 * (WIDTH * WIDTH + 2 * WIDTH)


def test_a_layer_that_changes_its_argument_is_refused() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: Tensor | None = None

    class Remembers(nn.Linear):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
            cache.keys = x if cache.keys is None else torch.cat([cache.keys, x])
            return super().forward(x)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Remembers(3, 3) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            for layer in self.layers:
                x = layer(x, cache)
            return x

    why = r"changes its argument, a .*Cache, .*use_cache=False"
    with pytest.raises(RuntimeError, match=why) as raised:
        plan_for(Decoder(), torch.randn(8, 3), memory="1GiB", devices=["cpu", "cpu"])
    assert any("layers.0" in note for note in raised.value.__notes__)


def test_a_block_that_a_micro_batch_does_not_call_is_no_place_to_cut() -> None:
    """Only large micro-batches have rows for each of these."""

    class Sometimes(Model):
        def forward(self, tokens: Tensor, **_: Any) -> Tensor:
            x: Tensor = self.embed(tokens) + self.shift
            for k, block in enumerate(self.blocks):
                x = block(x) if k != 1 or len(x) > 8 else x
            return x

    options: Any = {"memory": "1GiB", "devices": ["cpu", "cpu"], "best": 1000}
    tokens = torch.randint(7, (32,))
    found = plan_for(Sometimes(), tokens, chunks=[2, 8], loss_fn=square, **options)
    assert {each.chunks for each in found} == {2, 8}
    cuts = {cut for each in found if each.chunks == 8 for cut in each.cuts or ()}
    assert cuts and "blocks.1" not in cuts


def square(y: Tensor, _: object = None) -> Tensor:
    return y.square().mean()


def test_what_a_models_own_code_uses_later_is_in_the_costs_of_both_blocks() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            skip = self.a(x).relu()
            y = self.b(skip + 1)
            y = self.c(y * 2)
            z: Tensor = y + skip[:, :3].sum() + len(skip)
            return z

    a, b, c = costs(Skips(), "abc", torch.randn(8, WIDTH))
    assert total(without(b.inputs, a.outputs)) == 0
    skip = without(c.inputs, b.outputs)
    assert total(skip) == 4 * 8 * WIDTH and skip.keys() <= a.outputs.keys() - b.inputs.keys()


def test_a_cache_that_nobody_asked_for_is_not_made() -> None:
    """As in a pipe that recomputes. Afterwards the model makes it again."""

    class Cache:
        keys: Tensor | None = None

    class Layer(nn.Linear):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            if cache is not None:
                cache.keys = x
            return super().forward(x)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(use_cache=True)
            self.layers = nn.ModuleList([Layer(3, 3) for _ in range(3)])

        def forward(self, x: Tensor, use_cache: bool | None = None) -> Tensor:
            makes = self.config.use_cache if use_cache is None else use_cache
            cache = Cache() if makes else None
            for layer in self.layers:
                x = layer(x, cache)
            return x

    model = Decoder()
    options: Any = {"memory": "1GiB", "devices": ["cpu", "cpu"], "chunks": [2]}
    assert plan_for(model, torch.randn(8, 3), **options) and model.config.use_cache
    with pytest.raises(RuntimeError, match="changes its argument, a .*Cache"):
        plan_for(model, {"x": torch.randn(8, 3), "use_cache": True}, **options)


def test_blocks_are_found_with_as_many_rows_as_are_tried() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    assert plan_for(Norms(), torch.randn(4, 4), devices=["cpu"] * 4, memory="1GiB", chunks=2)


def test_more_devices_than_blocks_and_pipes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 3, got 4: .*\['embed', 'blocks.0'"):
        plan_for(Model(2), batch(), memory="1GiB", devices=["cpu"] * 4)
    with pytest.raises(ValueError, match="each partition needs a layer, got 3 partitions and 2"):
        layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        plan_for(layers, torch.randn(8, 3), memory="1GiB", devices=["cpu"] * 3)
    with pipeline(Model(), ["blocks.1"], devices=["cpu", "cpu"]) as pipe:
        with pytest.raises(TypeError, match="a pipe already"):
            plan_for(pipe, batch(), memory="1GiB", devices=["cpu"])


def test_a_sequential_with_a_forward_of_its_own_is_cut() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = x + layer(x)
            return x

    model = Residual(*[nn.Linear(3, 3) for _ in range(4)])
    found = plan_for(model, torch.randn(8, 3), memory="1GiB", devices=["cpu", "cpu"], chunks=[2])
    assert all(each.cuts for each in found)
