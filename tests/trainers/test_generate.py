"""``generate`` of a model in a pipe gives the plain model's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pipert

transformers = pytest.importorskip("transformers", reason="its generate calls the model")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CPUS, GPUS = ["cpu"] * 4, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
IDS = torch.randint(4, 90, (5, 6), generator=torch.Generator().manual_seed(7))
MASK = (torch.arange(6) >= torch.tensor([0, 2, 0, 4, 1])[:, None]).long()  # padded on the left
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LLAMA_CUTS = ["model.layers.1", "model.layers.3"]


def sharpen(model: Any) -> Any:
    """Makes the tokens depend on everything that comes before; those of a new model repeat."""
    for name, weight in model.named_parameters():
        weight.data.mul_(1 if "norm" in name else 6)
    return model.double().eval()


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return sharpen(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, **more})))


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).double().eval()


def qwen() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "vocab_size": 120, "rope_parameters": rope},
        vision_config={**vision, "mlp_ratio": 2},
        image_token_id=110, vision_start_token_id=112, vision_end_token_id=113,
    )  # fmt: skip
    return sharpen(transformers.Qwen2VLForConditionalGeneration(config))


def images() -> dict[str, Tensor]:
    """One image a row, of two sizes: as many patches as no other tensor has rows."""
    ids = torch.cat([IDS[:, :2], torch.tensor([[112, *[110] * 4, 113]] * 5), IDS[:, 2:]], 1)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(5 * 16, 96, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 5), "mm_token_type_ids": (ids == 110).long(),
    }  # fmt: skip


def texts() -> dict[str, Tensor]:
    return {"input_ids": IDS, "attention_mask": MASK}


def generate(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(5)
    given = {name: tensor.to(model.device) for name, tensor in batch.items()}
    tokens: Tensor = model.generate(**given, max_new_tokens=7, **options)
    return tokens.cpu()


def in_pipe(model: Any, cuts: list[str], devices: list[str] = CPUS) -> Any:
    return pipert.pipeline(model, cuts, devices=devices[: len(cuts) + 1], chunks=4)


def step(model: Any, batch: dict[str, Tensor]) -> None:
    """A step of training, of a model that goes on as before."""
    model.train()
    labels = batch["input_ids"].to(model.device)
    given = {name: tensor.to(model.device) for name, tensor in batch.items()}
    model(**given, labels=labels).loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= 0.1 * weight.grad
                weight.grad = None
    model.eval()


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 2.0},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "a static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_those_of_the_plain_model(options: dict[str, Any]) -> None:
    plain, model = llama(), llama()
    expected = generate(plain, texts(), **options)
    with in_pipe(model, LLAMA_CUTS) as pipe:
        assert torch.equal(generate(model, texts(), **options), expected)
        assert pipe.statistics().runs
    assert torch.equal(generate(model, texts(), **options), expected)


MODELS: dict[str, tuple[Callable[[], Any], list[str], Callable[[], dict[str, Tensor]]]] = {
    "Llama": (llama, LLAMA_CUTS, texts),
    "T5": (t5, ["encoder.block.1", "decoder.block.0", "decoder.block.1"], texts),
    "Qwen2-VL": (qwen, ["model.language_model.layers.1", "model.language_model.layers.3"], images),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_before_and_after_a_step_of_training_are_the_plain_models(name: str) -> None:
    build, cuts, batch = MODELS[name]
    plain, model = build(), build()
    with in_pipe(model, cuts):
        found = []
        for each in (plain, model):
            tokens = [generate(each, batch(), do_sample=False, num_beams=n) for n in (1, 2)]
            step(each, batch())
            found.append([*tokens, generate(each, batch(), do_sample=False)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(found[0][0], found[0][2])  # the step has changed something
    assert torch.equal(generate(model, batch(), do_sample=False), found[0][2])


@pytest.mark.parametrize("piped", ["the model", "the assistant", "both"])
def test_an_assistant_may_be_in_a_pipe_as_well(piped: str) -> None:
    """It proposes tokens, of which the model accepts some and crops its cache."""
    batch = {"input_ids": IDS[:1]}
    model, assistant = llama(), llama()
    assistant.lm_head.weight.data += torch.randn_like(assistant.lm_head.weight) / 30
    expected = generate(llama(), batch, do_sample=False)
    pipes = []
    if piped != "the assistant":
        pipes.append(in_pipe(model, LLAMA_CUTS))
    if piped != "the model":
        pipes.append(in_pipe(assistant, ["model.layers.1"]))
    found = generate(model, batch, assistant_model=assistant, do_sample=False)
    assert torch.equal(found, expected)
    assert all([pipe.statistics().runs for pipe in pipes])
    for pipe in pipes:
        pipe.close()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", MODELS)
def test_tokens_across_gpus_are_the_plain_models_in_the_pipe_and_after_it(name: str) -> None:
    build, cuts, batch = MODELS[name]
    expected, model = generate(build(), batch(), do_sample=False), build()
    with in_pipe(model, cuts, GPUS) as pipe:
        assert torch.equal(generate(model, batch(), do_sample=False), expected)
        assert {str(weight.device) for weight in pipe.parameters()} == set(GPUS)
    assert torch.equal(generate(model, batch(), do_sample=False), expected)
