"""Fine-tunes a causal language model of transformers over several processes.

    torchrun --nproc_per_node=2 examples/finetune_ranks.py
    torchrun --nproc_per_node=2 examples/finetune_ranks.py --lora
    torchrun --nproc_per_node=2 examples/finetune_ranks.py --load FOLDER --cuts model.layers.16

Without ``--load`` a tiny Llama is made from a configuration. Each rank holds only its own
parameters. At the end they are saved, and the first rank loads them into the plain model.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import pipert.distributed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--load", help="a folder with config.json and safetensors files")
    parser.add_argument("--cuts", nargs="*", default=["model.layers.2"])
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 4 alone")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=4)
    return parser.parse_args()


def build(options: argparse.Namespace) -> Any:
    config: Any = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    if options.load:
        config = AutoConfig.from_pretrained(options.load)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, adapters).base_model.model
    return model.train()


def batch(step: int, rows: int, vocabulary: int) -> dict[str, Tensor]:
    """Makes sequences that count upwards, padded to a length that differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    length = 12 + step % 2
    first = torch.randint(1, vocabulary, (rows, 1), generator=generator)
    ids = (first + torch.arange(length)) % (vocabulary - 1) + 1
    lengths = torch.randint(6, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def main() -> None:
    options = arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    if options.load and not options.lora:
        with pipert.empty_parameters():
            model = build(options)
    else:  # the initial values are those of the configuration
        model = build(options)
    vocabulary = model.config.vocab_size
    pipe = pipert.distributed.pipeline(
        model, options.cuts, example=batch(0, 2, vocabulary), chunks=options.chunks,
        load=None if options.lora else options.load,
    )  # fmt: skip
    trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for step in range(options.steps):
        rows: dict[str, Any] = batch(step, options.rows, vocabulary)
        labels = rows.pop("labels")
        # The mean over the tokens of the mini-batch, whose micro-batches have different numbers.
        loss = pipe.forward_backward(
            **rows,
            loss_fn=sum_of_losses,
            reduction="sum",
            denominator=(labels[:, 1:] != -100).sum(),
            target=labels,
        )
        torch.nn.utils.clip_grads_with_norm_(trained, 1.0, pipe.grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    pipe.eval()
    given = batch(options.steps, options.rows, vocabulary)
    outputs = pipe(**given)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, 0)
        save(pipe.state_dict(), checkpoint_id=folders[0])
        logits = [None if outputs is None else outputs.logits.cpu()]
        dist.broadcast_object_list(logits, dist.get_world_size() - 1)
        if dist.get_rank() == 0:
            plain = build(options).eval()
            state = plain.state_dict()
            load(state, checkpoint_id=folders[0], no_dist=True)
            plain.load_state_dict(state)
            with torch.no_grad():
                torch.testing.assert_close(plain(**given).logits, logits[0], rtol=1e-3, atol=1e-3)
            print(f"saved and loaded {len(state)} tensors: the plain model computes the same")
        dist.barrier()
    dist.destroy_process_group()


def sum_of_losses(output: Any, labels: Tensor) -> Tensor:
    logits = output["logits"][:, :-1]
    targets = labels[:, 1:].to(logits.device)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


if __name__ == "__main__":
    main()
