"""Models that are nowhere as a whole: planned on meta, loaded by part, trained as with values."""

from __future__ import annotations

import contextvars
import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import pipert
from pipert import pipeline, plan_for
from pipert.balance.counted import FLOPS

safetensors = pytest.importorskip("safetensors.torch", reason="checkpoints are in its files")

CPUS = ["cpu", "cpu"]
IDS = torch.randint(1, 60, (8, 12), generator=torch.Generator().manual_seed(0))
same = torch.testing.assert_close


class Block(nn.Module):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(self.norm(x)).relu()
        return y


class UNet(nn.Module):
    """Has skips, a table of its own, and a weight that two layers share."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))
        self.register_buffer("shift", torch.ones(()), persistent=False)
        self.stem = nn.Conv2d(3, width, 1)
        self.down = nn.ModuleList([Block(width, width) for _ in range(3)])
        self.up = nn.ModuleList([Block(2 * width, width) for _ in range(3)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.stem(x) * self.scale + self.shift, list[Tensor]()
        for block in self.down:
            kept.append(x)
            x = block(x)[..., ::2, ::2]
        for block in self.up:
            left = kept.pop()
            x = block(torch.cat([interpolate(x, size=left.shape[-2:]), left], dim=1))
        y: Tensor = self.head(x)
        return y


def images() -> dict[str, Any]:
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    loss_fn: Callable[..., Tensor] = nn.functional.mse_loss
    return {"example": {"x": x}, "target": 2 * x, "loss_fn": loss_fn}


def words(**more: Tensor) -> dict[str, Any]:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return {"example": {"input_ids": IDS, **more}, "target": IDS, "loss_fn": loss_fn}


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}


def neox() -> Any:
    t = pytest.importorskip("transformers")
    config = t.GPTNeoXConfig(**SMALL, num_hidden_layers=4, intermediate_size=64)
    return t.GPTNeoXForCausalLM(config)


def llama() -> Any:
    t = pytest.importorskip("transformers")
    config = t.LlamaConfig(
        **SMALL, num_hidden_layers=4, intermediate_size=64, num_key_value_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return t.LlamaForCausalLM(config)


def bloom() -> Any:
    t = pytest.importorskip("transformers")
    config = t.BloomConfig(vocab_size=64, hidden_size=32, n_head=4, n_layer=4)
    return t.BloomForCausalLM(config)  # whose attention refuses a cache of other layers


def mixtral() -> Any:
    t = pytest.importorskip("transformers")
    config = t.MixtralConfig(
        **SMALL, num_hidden_layers=4, intermediate_size=64, num_key_value_heads=2,
        num_local_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    return t.MixtralForCausalLM(config)


def t5() -> Any:
    t = pytest.importorskip("transformers")
    config = t.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "unet": (UNet, images),
    "neox": (neox, words),
    "llama": (llama, words),
    "bloom": (bloom, words),
    "mixtral": (mixtral, words),
    "t5": (t5, lambda: words(decoder_input_ids=IDS)),
}
each_model = pytest.mark.parametrize("name", MODELS)
of_transformers = pytest.mark.parametrize("name", ["neox", "llama", "mixtral", "t5"])


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each measured task take a millisecond, so that balances are the same in each run."""
    ticks = itertools.count()
    for where in ("measure", "calls"):
        monkeypatch.setattr(f"pipert.balance.{where}.now", lambda _: next(ticks) / 1000)


def made(name: str, on: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """Returns a model, without values on meta, and what to train it with."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    with torch.device(on):
        model = make()
    return model, batch()


def planned(model: nn.Module, batch: dict[str, Any], **options: Any) -> Any:
    options = {"memory": "1GiB", "devices": CPUS, "chunks": [4], "best": 1000, **options}
    return plan_for(model, **batch, optimizer=torch.optim.AdamW, **options)


@each_model
def test_bytes_are_those_of_the_model_with_values(name: str) -> None:
    sizes = []
    for on in ("cpu", "meta"):
        model, batch = made(name, on)
        found = planned(model, batch)
        sizes.append({(c.cuts, c.schedule, c.checkpoint): c.memory for c in found})
        assert {tensor.device.type for tensor in model.parameters()} == {on}
    real, empty = sizes
    both = real.keys() & empty.keys()
    assert both and all(real[key] == empty[key] for key in both)


def trained(pipe: Any, batch: dict[str, Any]) -> Tensor:
    options = {name: batch[name] for name in ("target", "loss_fn")}
    loss: Tensor = pipe.forward_backward(**batch["example"], **options)
    return loss


def check(model: Any, pipe: Any, plain: Any, batch: dict[str, Any]) -> None:
    """Compares a step with that of the plain model, micro-batch by micro-batch."""
    same(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    loss = trained(pipe, batch)
    expected = batch["loss_fn"](plain(**batch["example"]), batch["target"])
    expected.backward()
    same(loss, expected.detach())
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    same({name: parameter.grad for name, parameter in model.named_parameters()}, grads)


@of_transformers
def test_a_model_is_loaded_with_the_map_of_its_plan(name: str, tmp_path: Path) -> None:
    plain, batch = made(name)
    plain.save_pretrained(tmp_path, max_shard_size="60KB")
    plan = planned(made(name, "meta")[0], batch)[0]
    model = type(plain).from_pretrained(tmp_path, device_map=plan.device_map)
    before = {name: id(tensor) for name, tensor in model.named_parameters()}
    with plan.make(model) as pipe:
        assert before == {name: id(tensor) for name, tensor in model.named_parameters()}
        check(model, pipe, plain, batch)


@pytest.mark.parametrize("name", ["unet", "llama", "bloom", "t5"])
@pytest.mark.parametrize("how", ["pipeline", "plan", "function"])
def test_a_model_is_loaded_by_part(name: str, how: str, tmp_path: Path) -> None:
    plain, batch = made(name)
    safetensors.save_model(plain, tmp_path / "model.safetensors")  # a tied weight once
    torch.manual_seed(1)
    with pipert.empty_parameters():
        model = MODELS[name][0]()
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # before there are values, as people do
    if how == "plan":
        pipe = planned(model, batch)[0].make(model, load=tmp_path)
    else:
        load: Any = tmp_path if how == "pipeline" else plain.state_dict().get
        pipe = pipeline(model, example=batch["example"], devices=CPUS, chunks=4, load=load)
    with pipe:
        assert pipe.module is model
        assert {*optimizer.param_groups[0]["params"]} == {*pipe.parameters()}
        check(model, pipe, plain, batch)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_layers_compute_are_made_up(norm: Callable[[nn.Module], nn.Module]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), *[norm(nn.Linear(8, 8)) for _ in range(3)])

    with pipert.empty_parameters():
        model = make()
    x, plain = torch.randn(4, 8), make()
    load: Any = plain.state_dict().get
    with pipeline(model, example=x, devices=CPUS, load=load) as pipe, torch.no_grad():
        same(pipe(x), plain(x))


def test_a_planned_sequential_is_loaded_by_part() -> None:
    plain, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(4, 8)
    with pipert.empty_parameters():
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    plan = plan_for(model, x, devices=CPUS, memory="1GiB")[0]
    load: Any = plain.state_dict().get
    with plan.make(model, load=load) as pipe, torch.no_grad():
        same(pipe(x), plain(x))


def saved(tmp_path: Path, **changes: Tensor | None) -> UNet:
    """Saves a model without what is ``None``, in two files; returns one without values."""
    state = {**UNet().state_dict(), **changes}
    tensors = {name: tensor for name, tensor in state.items() if tensor is not None}
    names = [*tensors]
    for k, part in enumerate((names[:5], names[5:])):
        own = {name: tensors[name] for name in part}
        safetensors.save_file(own, tmp_path / f"model-{k}.safetensors")
    with pipert.empty_parameters():
        return UNet()


def refused(model: nn.Module, load: Any, kind: type[Exception] = ValueError) -> str:
    """Returns why a model cannot be loaded, which leaves it as it was."""
    before = {name: id(tensor) for name, tensor in model.named_parameters()}
    with pytest.raises(kind) as caught:
        pipeline(model, ["up.0"], devices=CPUS, load=load)
    assert before == {name: id(tensor) for name, tensor in model.named_parameters()}
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_all_names_that_do_not_fit_are_in_one_error(tmp_path: Path) -> None:
    changes = {"scale": torch.ones(3), "more": torch.ones(1), "head.bias": None}
    model = saved(tmp_path, **changes)
    told = refused(model, tmp_path)
    assert "missing are ['head.bias']" in told and "not in the model are ['more']" in told
    assert "of other shapes are ['scale: (3,), in the model (8, 1, 1)']" in told
    state = {**UNet().state_dict(), **changes}
    told = refused(model, state.get)
    assert "missing are ['head.bias']" in told and "of other shapes are ['scale: (3,)" in told


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_values_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in UNet().state_dict().items()}
    with pipert.empty_parameters():
        model = UNet()
    told = refused(model, state.get, TypeError)
    assert f"load gives {dtype} for 'scale', which is torch.float32" in told


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"scale": "model-0.safetensors", "head.bias": "model-2.safetensors"}}'
    )
    assert "['model-2.safetensors']" in refused(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    data = (tmp_path / "model-1.safetensors").read_bytes()
    (tmp_path / "model-1.safetensors").write_bytes(data[: len(data) // 2])
    assert "model-1.safetensors was opened" in refused(model, tmp_path, Exception)


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    model = saved(tmp_path)
    safetensors.save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"scale": "model-0.safetensors", "head.bias": "model-1.safetensors"}}'
    )
    pipeline(model, ["up.0"], devices=CPUS, load=tmp_path).close()
    assert not any(tensor.is_meta for tensor in model.parameters())


def test_pickles_are_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    torch.save(UNet().state_dict(), tmp_path / "pytorch_model.bin")
    with pipert.empty_parameters():
        model = UNet()
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        assert "torch.load(path, mmap=True).get" in refused(model, path)
    state = torch.load(tmp_path / "pytorch_model.bin", mmap=True)
    pipeline(model, ["up.0"], devices=CPUS, load=state.get).close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_loading_that_ends_early_leaves_nothing(error: Any) -> None:
    state, seen = UNet().state_dict(), list[weakref.ref[Tensor]]()

    def load(name: str) -> Tensor:
        if len(seen) == 7:
            raise error
        value: Tensor = state[name].clone()
        seen.append(weakref.ref(value))
        return value

    with pipert.empty_parameters():
        model = UNet()
    refused(model, load, error)
    gc.collect()
    assert len(seen) == 7 and not any(ref() is not None for ref in seen)


@pytest.mark.parametrize("name", MODELS.keys() - {"mixtral"})
def test_gpus_that_are_not_here_are_planned_by_counting(name: str) -> None:
    model, batch = made(name, "meta")
    found = planned(model, batch, devices=2)
    assert found[0].is_counted and "assumed" in found[0].report()
    counted, measured = (
        {(c.cuts, c.schedule, c.checkpoint): c.peaks for c in each}
        for each in (found, planned(model, batch))
    )
    ratios = [
        a / b
        for key in counted.keys() & measured.keys()
        for a, b in zip(counted[key], measured[key], strict=True)
    ]
    assert ratios and 0.9 < min(ratios) and max(ratios) < 1.1  # kernels of attention differ


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpoints_inside_are_counted() -> None:
    model, batch = made("llama", "meta")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert planned(model, batch, devices=2)[0].is_counted


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_map_of_adapters_is_for_their_base() -> None:
    peft = pytest.importorskip("peft")
    adapters: Any = {"target_modules": ["query_key_value"], "modules_to_save": ["embed_out"]}
    model, batch = made("neox", "meta")
    with torch.device("meta"):
        model = peft.get_peft_model(model, peft.LoraConfig(**adapters))
    names = {name for name, _ in made("neox", "meta")[0].named_modules()}
    assert all(found.device_map.keys() <= names for found in planned(model, batch))


def test_a_hook_collects_each_output_once() -> None:
    collected = contextvars.ContextVar[list[Tensor]]("collected")
    scale = contextvars.ContextVar[float]("scale")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(k, k + 1) for k in range(2, 6)])
            for layer in self.layers:
                layer.register_forward_hook(self.collect)
                layer.register_forward_pre_hook(self.read)

        def read(self, *_: object) -> None:
            assert scale.get() == 2

        def collect(self, _: Any, __: Any, y: Tensor) -> None:
            if (found := collected.get(None)) is not None:
                found.append(y)

        def forward(self, x: Tensor) -> Tensor:  # as transformers collects hidden states
            token = collected.set([])
            scale.set(2.0)
            for layer in self.layers:
                x = layer(x)
            found = collected.get()
            collected.reset(token)
            assert len(found) == 4
            return found[-1]

    with torch.device("meta"):
        model = Model()
    assert plan_for(model, torch.ones(4, 2), devices=CPUS, memory="1GiB")


def test_a_layer_that_cannot_be_counted_is_named() -> None:
    model, batch = made("mixtral", "meta")
    with pytest.raises(RuntimeError) as caught:
        planned(model, batch, devices=2)
    told = "\n".join(caught.value.__notes__)
    assert "model.layers.0" in told and "pass a list of devices" in told


def test_times_are_those_of_the_operations_that_were_counted() -> None:
    width, rows, layers = 4096, 8192, 4
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to("meta")
    plan = plan_for(model, torch.empty(rows, width, device="meta"), devices=1, memory="80GiB",
                    chunks=[1])[0]  # fmt: skip
    products = 3 * layers - 1  # the input of the first layer needs no gradient
    least = products * 2 * rows * width**2 / FLOPS
    assert least <= plan.seconds < 1.5 * least


def test_a_plan_says_how_many_gpus_would_do() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(24)]).to("meta")
    x = torch.empty(64, 256, device="meta")
    weights = 256 * 257 * 4 * 24
    options: Any = {"chunks": 8, "optimizer": torch.optim.AdamW}
    found = plan_for(model, x, devices=8, memory=weights, **options)
    fewest = found[0].fewest
    assert 4 < fewest < 8 and f"would do, if all is recomputed: {fewest}" in str(found)
    assert plan_for(model, x, devices=fewest, memory=weights, **options)[0].fewest == fewest
    with pytest.raises(ValueError, match=f"; use {fewest} devices with .* each, fewer rows"):
        plan_for(model, x, devices=fewest - 1, memory=weights, **options)
    with pytest.raises(ValueError, match="use larger devices, fewer rows"):
        plan_for(model, x, devices=8, memory="1MiB", **options)


def test_a_config_of_quantised_weights_is_refused() -> None:
    model, batch = made("llama", "meta")
    model.config.quantization_config = {"load_in_4bit": True}
    with pytest.raises(ValueError, match="load it with device_map='auto', then plan"):
        planned(model, batch)


def test_counting_is_refused_under_autocast() -> None:
    model, batch = made("unet", "meta")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        planned(model, batch, devices=2)
