"""Tests what a replay draws, refuses and shares, and faults of any model over ranks."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pipert
from pipert import distributed
from pipert.distributed import rank_stage
from pipert.distributed.replay_model import Recording
from tests.distributed.launcher import endings, run
from tests.distributed.own_models import (
    MODELS,
    Tied,
    build,
    layer,
    loss_in_output,
    tied_batch,
    unet_batch,
)

# Random numbers -----------------------------------------------------------------------------------


class Noisy(Tied):
    """Draws in layers, in its own code, and by whether to skip a block."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.blocks = nn.ModuleList([nn.Sequential(layer(8), nn.Dropout(0.2)) for _ in range(4)])

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        h = self.dropout(self.embed(ids)) + torch.randn(8)
        for k, block in enumerate(self.blocks):
            if k == 1 or torch.rand(()) < 0.7 or k == 2:
                h = h + block(h)
        h = F.dropout(h, 0.2, self.training)
        logits = self.head(self.norm(h))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), torch.ones(ids.numel()).long())}


def noisy(rank: int, schedule: str, checkpoint: str) -> list[Any]:
    torch.manual_seed(0)
    model = Noisy()
    cuts = ["blocks.1", "blocks.2", "norm"]
    pipe = distributed.pipeline(
        model, cuts, example={"ids": tied_batch(2)["ids"]}, chunks=4, schedule=schedule,
        checkpoint=checkpoint,
    )  # fmt: skip
    torch.manual_seed(7)
    given: dict[str, Any] = {"ids": tied_batch(8)["ids"]}
    losses = [pipe.forward_backward(**given, loss_fn=loss_in_output) for _ in range(3)]
    grads = {name: p.grad for name, p in pipe.named_parameters(remove_duplicate=False)}
    return [losses, grads]


def test_random_numbers_are_the_same_on_however_many_ranks_and_when_recomputed() -> None:
    found = [
        run(2, noisy, "interleaved", "always"), run(4, noisy, "1f1b", "never"),
    ]  # fmt: skip
    (losses, grads), (_, others) = found[0]
    grads.update(others)
    assert len({loss.item() for loss in losses}) == 3
    for each in found[1:]:
        for other_losses, others in each:
            torch.testing.assert_close(losses, other_losses)
            for name, grad in others.items():
                torch.testing.assert_close(grad, grads[name])


# Arguments, state, evaluation ---------------------------------------------------------------------


def variously(rank: int) -> list[Any]:
    """Ready micro-batches of several lengths, everywhere, and a saved safetensors-like load."""
    names: list[str] = []
    plain = build("tied").state_dict()

    def load(name: str) -> Tensor:
        names.append(name)
        value: Tensor = plain[name]
        return value

    with pipert.empty_parameters():
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    example = tied_batch(2)
    pipe = distributed.pipeline(
        model, ["blocks.2"], example=example, load=load, inputs="everywhere", chunks=3
    )
    ready = [tied_batch(2, length) for length in (4, 7, 5)]
    loss = pipe.forward_backward(microbatches=ready, loss_fn=loss_in_output)
    norm = pipe.grad_norm()
    held = sum(p.numel() for p in model.parameters() if not p.is_meta)
    pipe.eval()
    return [loss, norm, sorted(set(names)), held, pipe(**tied_batch(5))]


def test_ready_micro_batches_everywhere_and_parameters_by_rank() -> None:
    plain = build("tied")
    parts = [plain(**tied_batch(2, length))["loss"] for length in (4, 7, 5)]
    loss = torch.stack(parts).mean()
    torch.autograd.backward(loss)
    grads = [p.grad.flatten() for p in plain.parameters() if p.grad is not None]
    found = run(2, variously)
    for other, norm, names, held, _ in found:
        torch.testing.assert_close(other, loss.detach())
        torch.testing.assert_close(norm, torch.cat(grads).norm())
        assert held < sum(p.numel() for p in plain.parameters())
        assert len(names) < len(plain.state_dict())
    whole = {name for _, _, names, *_ in found for name in names}
    assert whole | {"head.weight"} >= set(plain.state_dict())
    torch.testing.assert_close(found[1][4]["logits"], plain(**tied_batch(5))["logits"].detach())


def maps(rank: int) -> list[Any]:
    pipe = distributed.pipeline(build("tied"), ["blocks.2"], example=tied_batch(2), chunks=2)
    pipe.eval()
    batches = [tied_batch(2, length) for length in (4, 7, 5, 3, 6)]
    found = list(pipe.map(batches if rank == 0 else ()))
    assert not list(pipe.map([]))
    with pytest.raises((Fault, distributed.RankError)):
        list(pipe.map(_breaking(batches)))
    pipe(**tied_batch(4))
    return found


def _breaking(batches: list[Any]) -> Any:
    yield from batches[:3]
    if dist.get_rank() == 0:
        raise Fault("no more")


def test_a_data_set_is_mapped() -> None:
    plain = build("tied").eval()
    first, second = run(2, maps)
    assert first == [None] * 5
    for output, length in zip(second, (4, 7, 5, 3, 6), strict=True):
        torch.testing.assert_close(output["logits"], plain(**tied_batch(2, length))["logits"])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.c = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x)) + self.c(x)
        return y


def defers(rank: int, deferred: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    pipe = distributed.pipeline(
        Normed(), ["b"], example=torch.randn(2, 4), chunks=4, deferred_batch_norm=deferred,
        checkpoint="always",
    )  # fmt: skip
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) + 2
    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return {name: buffer for name, buffer in pipe.named_buffers()}


@pytest.mark.parametrize("deferred", [True, False])
def test_running_statistics(deferred: bool) -> None:
    plain = Normed()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) + 2
    for rows in [x] if deferred else torch.split(x, 2):
        plain(rows)
    found = run(2, defers, deferred)
    assert set().union(*found) == set(dict(plain.named_buffers()))
    for each in found:
        for name, buffer in each.items():
            torch.testing.assert_close(buffer, plain.get_buffer(name))


class Hooked(Tied):
    """Has hooks on a layer of the first partition, one of which changes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda layer, args, y: y * 2)
        self.blocks[0].register_full_backward_hook(lambda layer, dxs, dys: None)


def hooked(rank: int) -> Any:
    torch.manual_seed(0)
    pipe = distributed.pipeline(Hooked(), ["blocks.2"], example=tied_batch(2), chunks=2)
    given: dict[str, Any] = tied_batch(4)
    return pipe.forward_backward(**given, loss_fn=loss_in_output)


def test_hooks_on_layers_of_earlier_partitions() -> None:
    torch.manual_seed(0)
    loss = Hooked()(**tied_batch(4))["loss"].detach()
    for found in run(2, hooked):
        torch.testing.assert_close(found, loss)


def infers(rank: int) -> Any:
    pipe = distributed.pipeline(build("tied"), ["blocks.2"], example=tied_batch(2), chunks=2)
    pipe.eval()
    with torch.inference_mode():
        found = pipe(**tied_batch(4)), distributed.Pipe(nn.Sequential(layer(8), layer(8)), [1, 1])
        return found[0], found[1](torch.ones(2, 8))


def test_a_forward_in_inference_mode() -> None:
    expected = build("tied")(**tied_batch(4))["logits"].detach()
    y, of_chain = run(2, infers)[1]
    torch.testing.assert_close(y["logits"], expected)
    assert of_chain.shape == (2, 8)


def loads_of_another(rank: int) -> Any:
    other = Chain(lambda *a: a[2])
    other.get_buffer("mean").fill_(3)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pipert.empty_parameters():
        model: Any = Chain(lambda *a: a[2])
    model.a.weight.rank_of_update = 8
    x = torch.ones(4, 4)
    pipe = distributed.pipeline(model, ["b"], example=x, load=other.state_dict().get)
    state = pipe.state_dict()
    for name, value in state.items():
        torch.testing.assert_close(value, before[name])
        value.add_(1)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, before[name])
    assert model.a.weight.rank_of_update == 8
    with pytest.raises(ValueError, match="assign=True"):
        pipe.load_state_dict(state, assign=True)
    return sorted(state)


def test_loaded_values_are_copies_and_none_is_assigned() -> None:
    first, second = run(2, loads_of_another)
    assert "a.weight" in first and "b.weight" in second and "mean" in second


def loads_files(rank: int, folder: str) -> dict[str, Tensor]:
    with pipert.empty_parameters():
        model = build("unet").bfloat16()
    pipe = distributed.pipeline(model, ["middle"], example=unet_batch(2), load=folder)
    return pipe.state_dict()


def test_files_of_safetensors_are_loaded(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = build("unet").state_dict()
    names = sorted(state)
    for k, some in enumerate((names[:5], names[5:])):
        save_file({name: state[name] for name in some}, tmp_path / f"model-{k}.safetensors")
    found = run(2, loads_files, str(tmp_path))
    assert set().union(*found) == set(state)
    for each in found:
        for name, value in each.items():
            assert torch.equal(value, state[name].to(value.dtype)), name


def holds(rank: int) -> tuple[int, int]:
    """The most bytes of tensors while loading, and those of this rank's share with one layer."""
    with pipert.empty_parameters():
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32)) for _ in range(8)])
    most = 0

    def held() -> int:
        tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        memories = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
        return sum(memories.values())

    def load(name: str) -> Tensor:
        nonlocal most
        value = torch.ones(model.get_parameter(name).shape)
        most = max(most, held())
        return value

    x = torch.ones(2, 32)
    before = held()
    pipe = distributed.pipeline(model, ["4"], example=x, load=load)
    share = sum(p.nbytes for p in pipe.parameters())
    return most - before, share + 4 * (32 * 32 + 32)


def test_while_loading_a_rank_holds_its_share_and_a_layer() -> None:
    for most, allowed in run(2, holds):
        assert 0 < most <= allowed


def chooses(rank: int) -> Any:
    pipe = distributed.pipeline(build("unet"), partitions=2, example=unet_batch(2))
    given: dict[str, Any] = unet_batch(8)
    loss = pipe.forward_backward(**given, loss_fn=MODELS["unet"][3])
    return pipe.cuts, loss


def test_measured_cuts_are_the_same_on_all_ranks() -> None:
    plain = MODELS["unet"][3](build("unet")(**unet_batch(8)), None)
    (cuts, _), (others, _) = found = run(2, chooses, seconds=50)
    assert cuts == others and len(cuts) == 1
    for _, loss in found:
        torch.testing.assert_close(loss, plain.detach())


def everywhere(rank: int, differs: str) -> str:
    pipe = distributed.pipeline(
        build("tied"), ["blocks.2"], example=tied_batch(2), chunks=2, inputs="everywhere"
    )
    given: dict[str, Any] = tied_batch(4)
    if rank and differs == "values":
        given["ids"] = given["ids"].roll(1, 0)
    if rank and differs == "lengths":
        given = tied_batch(4, 6)
    with pytest.raises(ValueError) as caught:
        pipe.forward_backward(**given, loss_fn=loss_in_output)
    same: dict[str, Any] = tied_batch(4)
    pipe.forward_backward(**same, loss_fn=loss_in_output)
    return str(caught.value)


@pytest.mark.parametrize("differs", ["values", "lengths"])
def test_arguments_that_differ_between_ranks_are_refused(differs: str) -> None:
    assert all("the same arguments" in text for text in run(2, everywhere, differs))


def target_with_graph(rank: int) -> Tensor | None:
    x, weight = torch.ones(4, 4), torch.ones(4, requires_grad=True)
    torch.manual_seed(0)
    pipe = distributed.pipeline(Chain(lambda *a: a[2]), ["b"], example=x, chunks=2)
    pipe.forward_backward(x, target=x * weight * weight, loss_fn=F.mse_loss)
    return weight.grad


def test_a_target_with_a_graph_gets_its_gradient() -> None:
    torch.manual_seed(0)
    x, weight = torch.ones(4, 4), torch.ones(4, requires_grad=True)
    torch.autograd.backward(F.mse_loss(Chain(lambda *a: a[2])(x), x * weight * weight))
    first, second = run(2, target_with_graph)
    assert first is None
    torch.testing.assert_close(second, weight.grad)


def test_empty_parameters_that_layers_share_stay_one_and_other_threads_get_real_ones() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pipert.empty_parameters(), pipert.empty_parameters():
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first.weight = second.weight = weight
        with ThreadPoolExecutor(1) as threads:
            elsewhere = threads.submit(nn.Linear, 2, 2).result()
    assert first.weight is second.weight and first.weight.is_meta
    assert not elsewhere.weight.is_meta and not nn.Linear(2, 2).weight.is_meta


def with_cache(rank: int) -> str:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=4,
        num_attention_heads=2, pad_token_id=0, use_cache=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises((distributed.ReplayError, distributed.RankError)) as caught:
        ids = tied_batch(2)["ids"]
        distributed.pipeline(model, ["model.layers.2"], example={"input_ids": ids})
    return str(caught.value)


def test_a_cache_that_layers_fill_is_refused() -> None:
    pytest.importorskip("transformers")
    assert all("use_cache=False" in text for text in run(2, with_cache, seconds=50))


# Records ------------------------------------------------------------------------------------------


class Lengths(nn.Module):
    """Own code that takes as many events as there are columns; an early tensor is used at last.

    Another stays alive, though nothing behind the cut uses it.
    """

    def __init__(self, looping: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
        self.looping = looping

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.a(x[..., None])
        for _ in range(x.shape[1] if self.looping else 2):
            h = h * 0.9
        extra = h + first
        y: Tensor = self.c(self.b(h) * x[..., None]) + extra
        return y.mean(1)


def lengths(rank: int, looping: bool) -> list[tuple[Tensor, int, int]]:
    """Steps of several lengths: the loss, the recordings so far, and how many tensors cross."""
    torch.manual_seed(0)
    recordings, crossing = list[int](), [0]
    run_once, pack = Recording.run, vars(rank_stage)["pack"]

    def recording(self: Any, *args: Any) -> Any:
        recordings.append(1)
        return run_once(self, *args)

    def packing(value: Any) -> Any:
        parcel = pack(value)
        crossing.append(len(parcel.tensors))
        return parcel

    # Of this process alone.
    setattr(Recording, "run", recording)  # noqa: B010
    setattr(rank_stage, "pack", packing)  # noqa: B010
    pipe = distributed.pipeline(Lengths(looping), ["b"], example=torch.ones(4, 2), chunks=2)
    found = []
    for length in LENGTHS:
        x = torch.arange(4.0 * length).reshape(4, length)
        loss = pipe.forward_backward(x, target=torch.ones(4, 1), loss_fn=F.mse_loss)
        found.append((loss, len(recordings), crossing[-1]))
    return found


LENGTHS = (2, 3, 4, 5, 5)


@pytest.mark.parametrize("looping, crossing", [(False, [2] * 5), (True, [2, 3, 3, 3, 3])])
def test_one_record_serves_for_all_lengths(looping: bool, crossing: list[int]) -> None:
    """Where it does not fit, as where the own code takes other events, all tensors cross."""
    torch.manual_seed(0)
    plain = Lengths(looping)
    for rank, found in enumerate(run(2, lengths, looping)):
        for (loss, _, _), length in zip(found, LENGTHS, strict=True):
            y = plain(torch.arange(4.0 * length).reshape(4, length))
            torch.testing.assert_close(loss, F.mse_loss(y, torch.ones(4, 1)).detach())
        assert [recordings for _, recordings, _ in found] == [2] * 5  # one to place parameters
        assert rank or [number for *_, number in found] == crossing


# What is refused ----------------------------------------------------------------------------------


class Chain(nn.Module):
    """Two layers with something of the caller's between them."""

    def __init__(self, between: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.between = between

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h = self.between(self, x, h)
        return self.c(self.b(h))


class Keeping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept = y.sum()
        return y


class Appending(nn.Linear):
    def forward(self, x: Tensor, into: Any = None) -> Tensor:
        if into is not None:
            into.append(x)
        return super().forward(x)


def needs_value(model: Any, x: Tensor, h: Tensor) -> Any:
    return h if h.mean() > 100 else h * 2


def writes_into_view(model: Any, x: Tensor, h: Tensor) -> Any:
    buffer = torch.zeros(2, *h.shape)
    buffer[0].copy_(h)
    return h + buffer.sum(0)


def reads_kept(model: Any, x: Tensor, h: Tensor) -> Any:
    return h * model.a.kept


def changes_parameter(model: Any, x: Tensor, h: Tensor) -> Any:
    with torch.no_grad():
        model.a.weight.mul_(h.mean())
    return h


def in_checkpoint(model: Any, x: Tensor, h: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(model.b, h, use_reentrant=False)


def appends(model: Any, x: Tensor, h: Tensor) -> Any:
    return model.a(h, into=[])


def changes_input(model: Any, x: Tensor, h: Tensor) -> Any:
    return h * x.mul_(2)


def adds_to_buffer(model: Any, x: Tensor, h: Tensor) -> Any:
    model.mean.mul_(0.5).add_(h.detach().mean(0))
    return h


def keeps(model: Any, x: Tensor, h: Tensor) -> Any:
    model.kept = getattr(model, "kept", None)
    if model.kept is None:
        model.kept = torch.ones_like(h)
    return h + model.kept


def counts(model: Any, x: Tensor, h: Tensor) -> Any:
    model.mean += 1
    return h


class Caching(nn.Linear):
    """A layer that keeps, for each number of rows, a tensor like its first argument."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.tables: dict[int, Tensor] = {}
        self.calls: list[Any] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        self.last = x
        return super().forward(x) + self.tables.setdefault(len(x), torch.ones_like(x))


def caches(rank: int) -> list[Any]:
    torch.manual_seed(0)
    model = Chain(lambda *a: a[2])
    model.a, model.b = Caching(), Caching()
    x = torch.ones(4, 4)
    pipe = distributed.pipeline(model, ["b"], example=x)
    assert model.b.last is None and not model.b.tables and model.b.calls == [4]
    return [pipe.forward_backward(x, target=x * 2, loss_fn=F.mse_loss) for _ in range(2)]


def test_a_layer_keeps_nothing_of_a_recording() -> None:
    torch.manual_seed(0)
    plain = Chain(lambda *a: a[2])
    plain.a, plain.b = Caching(), Caching()
    x = torch.ones(4, 4)
    loss = F.mse_loss(plain(x), x * 2).detach()
    for losses in run(2, caches):
        torch.testing.assert_close(losses, [loss, loss])


class Hidden:
    """What no pytree sees."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Hiding(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        assert y.isfinite().all()
        return Hidden(y)


def hides(model: Any, x: Tensor, h: Any) -> Any:
    return h.y


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (needs_value, "needs the value of a tensor"), (writes_into_view, "under another name"),
    (reads_kept, "made unseen"), (changes_parameter, "changes a parameter"),
    (in_checkpoint, "torch.utils.checkpoint"), (appends, "changes an argument"),
    (changes_input, "changes one of its inputs"), (adds_to_buffer, "the buffer 'mean'"),
    (hides, "inside of a Hidden"), (keeps, "made unseen"), (counts, "changes the buffer 'mean'"),
]  # fmt: skip


def refused(rank: int, between: Callable[..., Any]) -> str:
    torch.manual_seed(0)
    model = Chain(between)
    if between is reads_kept:
        model.a = Keeping(4, 4)
    if between is appends:
        model.a = Appending(4, 4)
    if between is hides:
        model.a = Hiding(4, 4)
    x = torch.randn(4, 4)
    before = x.clone()
    try:
        pipe = distributed.pipeline(model, ["b"], example=x, chunks=2)
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    except distributed.ReplayError as error:
        return str(error)
    except distributed.RankError as error:
        return str(error)
    finally:
        assert torch.equal(x, before)
    return "nothing was refused"


@pytest.mark.parametrize("between, why", REFUSED, ids=lambda each: getattr(each, "__name__", None))
def test_what_is_refused(between: Callable[..., Any], why: str) -> None:
    for text in run(2, refused, between):
        assert why in text


class InPlace(nn.Module):
    """Changes views of results of layers, before and after they cross."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, 0] += 1
        buffer = torch.zeros_like(x)
        buffer[:, 1:] = h[:, 1:]
        y = self.b(h)
        y[:, :2].add_(h[:, :2])
        y.add_(buffer)
        out: Tensor = self.c(y) + h
        return out


def works_in_place(rank: int) -> list[Any]:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    pipe = distributed.pipeline(InPlace(), ["b"], example=x, chunks=2)
    loss = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return [loss, {name: p.grad for name, p in pipe.named_parameters()}]


def test_own_code_may_work_in_place() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    plain = InPlace()
    loss = F.mse_loss(plain(x), x)
    torch.autograd.backward(loss)
    named = dict(plain.named_parameters())
    for other, grads in run(2, works_in_place):
        torch.testing.assert_close(other, loss.detach())
        for name, grad in grads.items():
            torch.testing.assert_close(grad, named[name].grad)


def reuses_memory(model: Any, x: Tensor, h: Tensor) -> Any:
    for _ in range(20):
        buffer = torch.zeros_like(x)
        buffer[:, 0] = h[:, 0]
        h = h + buffer
        del buffer
        h = h + torch.zeros_like(x)
    return h


def test_memory_of_a_tensor_that_is_gone_may_be_used_again() -> None:
    assert run(2, refused, reuses_memory) == ["nothing was refused"] * 2


def wrong_arguments(rank: int) -> list[str]:
    found = []
    x = torch.randn(4, 4)
    changes: list[dict[str, Any]] = [
        {"inputs": "some"}, {"cuts": ["nowhere"]}, {"cuts": None},
        {"chunks": 1 + rank}, {"load": "/nowhere"}, {"schedule": "interleaved", "cuts": ["b", "c"]},
    ]  # fmt: skip
    for more in changes:
        given: dict[str, Any] = {"cuts": ["b"], "example": x} | more
        try:
            distributed.pipeline(Chain(lambda *a: a[2]), **given)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    pipe = distributed.pipeline(Chain(lambda *a: a[2]), ["b"], example=x)
    try:
        pipe.forward_backward(x.requires_grad_(), target=x.detach(), loss_fn=F.mse_loss)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_wrong_arguments_are_refused() -> None:
    expected = [
        "inputs must be", "no module 'nowhere'", "give cuts or partitions",
        "all ranks must give the same", "load must be a folder", "needs one partition on each rank",
        "requires grad",
    ]  # fmt: skip
    for found in run(2, wrong_arguments):
        assert len(found) == len(expected)
        for text, why in zip(found, expected, strict=True):
            assert why in text


# Faults -------------------------------------------------------------------------------------------


class Fault(RuntimeError):
    """The fault of a test."""


def fails(where: str, is_on: list[bool], j: int, *args: Any) -> Any:
    if is_on[0] and where == "layer":
        raise Fault(where)
    if is_on[0] and where == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


class Faulty(Tied):
    """Fails in its own code when told to, but not in recordings."""

    is_on = False

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        if self.is_on:
            raise Fault("own code")
        return super().forward(ids, labels)


def after_fault(rank: int, where: str, failing: int) -> list[Any]:
    """A step that fails on one rank, then one that does not; or how the others end."""
    torch.manual_seed(0)
    model = Faulty()
    pipe = distributed.pipeline(model, ["blocks.2"], example=tied_batch(2), chunks=4)
    given: dict[str, Any] = tied_batch(8)
    pipe.forward_backward(**given, loss_fn=loss_in_output)
    before = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    is_on = [rank == failing]
    hooked = model.blocks[0 if failing == 0 else 3]
    hooked.register_forward_hook(partial(fails, where, is_on))
    model.is_on = is_on[0] and where == "own code"

    def loss_fn(y: Any, target: Any) -> Tensor:
        if where == "loss":
            raise Fault(where)
        return loss_in_output(y, target)

    try:
        pipe.forward_backward(**given, loss_fn=loss_fn)
    except (Fault, distributed.RankError) as error:
        found = [type(error).__name__, str(error)]
    if where == "killed":
        return found
    for name, p in pipe.named_parameters():
        if name in before:
            torch.testing.assert_close(p.grad, before[name], rtol=0, atol=0)
    is_on[0] = model.is_on = False
    return [*found, pipe.forward_backward(**given, loss_fn=loss_in_output)]


@pytest.mark.parametrize(
    "where, failing", [("layer", 0), ("layer", 1), ("own code", 0), ("own code", 1), ("loss", 1)]
)
def test_a_rank_that_raises_tells_all_and_the_next_step_works(where: str, failing: int) -> None:
    found = run(2, after_fault, where, failing)
    kinds = [kind for kind, *_ in found]
    assert kinds[failing] == "Fault" and kinds[1 - failing] == "RankError"
    assert where in found[1 - failing][1]
    plain = build("tied")(**tied_batch(8))["loss"].detach()
    for *_, loss in found:
        torch.testing.assert_close(loss, plain)


class Unreadable:
    """An argument that the second rank cannot unpickle."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> Any:
    if dist.get_rank() == 1:
        raise Fault("unpickled")
    return Unreadable()


class Taking(Tied):
    def forward(self, ids: Tensor, labels: Tensor | None = None, extra: Any = None) -> Any:
        return super().forward(ids, labels)


def argument_fails(rank: int) -> list[str]:
    pipe = distributed.pipeline(Taking(), ["blocks.2"], example=tied_batch(2), chunks=2)
    given: dict[str, Any] = tied_batch(4)
    with pytest.raises((Fault, distributed.RankError)) as caught:
        pipe.forward_backward(**given, extra=Unreadable(), loss_fn=loss_in_output)
    pipe.forward_backward(**given, loss_fn=loss_in_output)
    return [type(caught.value).__name__, str(caught.value)]


def test_an_argument_that_a_rank_cannot_read() -> None:
    first, second = run(2, argument_fails)
    assert first[0] == "RankError" and second[0] == "Fault" and "unpickled" in first[1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(failing: int) -> None:
    ended = endings(2, after_fault, "killed", failing, seconds=50, group=20)
    assert ended[failing].exitcode == -signal.SIGKILL
    assert ended[1 - failing].result[0] == "RankError"


def replicas(rank: int) -> list[Any]:
    """Two copies of a pipeline of two ranks, by DistributedDataParallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))

    def wrap(partition: nn.Module) -> nn.Module:
        return DistributedDataParallel(partition, process_group=mesh.get_group("copies"))

    pipe = distributed.pipeline(
        build("unet"), ["middle"], example=unet_batch(2), mesh=mesh, wrap=wrap, chunks=2
    )
    rows = slice(mesh.get_local_rank("copies"), None, 2)
    given: dict[str, Any] = {name: value[rows] for name, value in unet_batch(8).items()}
    pipe.forward_backward(**given, loss_fn=MODELS["unet"][3])
    dist.barrier()
    return [{name: p.grad for name, p in pipe.named_parameters()}]


def test_copies_of_a_pipeline() -> None:
    plain = build("unet")
    torch.autograd.backward(MODELS["unet"][3](plain(**unet_batch(8)), None))
    named = dict(plain.named_parameters())
    for (grads,) in run(4, replicas):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, named[name].grad)


class Normalised(nn.Module):
    """A normalised layer, and in the next partition something of the caller's."""

    def __init__(self, ends: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.ends = ends

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.a(x))
        return self.b(h) + self.ends(self, h)


def hooks_late(model: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda dh: dh * 3)  # type: ignore[no-untyped-call]
    return h


def reads_statistics(model: Any, h: Tensor) -> Tensor:
    mean: Tensor = model.norm.running_mean + 0
    return mean


def normalises_again(model: Any, h: Tensor) -> Tensor:
    y: Tensor = model.norm(h)
    return y


def refused_late(rank: int, ends: Callable[..., Any]) -> str:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    try:
        distributed.pipeline(Normalised(ends), ["b"], example=x, deferred_batch_norm=False)
    except (ValueError, distributed.ReplayError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    "ends, why",
    [(hooks_late, "calls register_hook of a tensor of an earlier partition"),
     (reads_statistics, "reads running statistics of a layer"),
     (normalises_again, "which would update its running statistics")],
    ids=lambda each: getattr(each, "__name__", None),
)  # fmt: skip
def test_what_only_another_rank_has_is_refused(ends: Callable[..., Any], why: str) -> None:
    for text in run(2, refused_late, ends):
        assert why in text


def leaves_the_generator(rank: int) -> bool:
    torch.manual_seed(0)
    model, x, before = Chain(lambda model, x, h: h), torch.randn(4, 4), torch.get_rng_state()
    pipe = distributed.pipeline(model, ["b"], example=x, chunks=2)
    is_left = torch.equal(torch.get_rng_state(), before)
    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return is_left and torch.equal(torch.get_rng_state(), before)


def test_a_model_without_randomness_leaves_the_generator_alone() -> None:
    assert run(2, leaves_the_generator) == [True] * 2


def hooked_after(rank: int, schedule: str) -> bool:
    torch.manual_seed(0)
    seen: set[Tensor] = set()
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x, cuts = torch.randn(4, 4), ["1", "2", "3"]
    pipe = distributed.pipeline(layers, cuts, example=x, chunks=4, schedule=schedule)
    for parameter in pipe.parameters():
        hookable: Any = parameter
        hookable.register_post_accumulate_grad_hook(seen.add)
    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return seen == {*pipe.parameters()}


def test_hooks_on_gradients_are_called() -> None:
    assert run(2, hooked_after, "interleaved") == [True] * 2
