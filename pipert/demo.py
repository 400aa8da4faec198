"""Trains a small GPT for a while and shows what the devices did: ``python -m pipert demo``."""

from __future__ import annotations

import argparse
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert.model.devices import default_devices
from pipert.pipe import Pipe

WIDTH, CONTEXT, ROWS, CHUNKS = 128, 64, 32, 8


class Block(nn.TransformerEncoderLayer):
    """Causal attention with four heads, and a feed-forward network; keeps the shape."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        y: Tensor = super().forward(x, mask, is_causal=True)
        return y


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def add_parser(tools: Any) -> None:
    """Add ``demo`` to the tools of ``python -m pipert``."""
    parser = tools.add_parser(
        "demo",
        help="train a small GPT, and show what the devices did",
        description="Train a small GPT on the source code of Python's standard library, on the GPUs"
        " that are there or two CPU workers, and record two steps as a picture and a report.",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to train (20)")
    parser.add_argument("--out", type=Path, default=Path("pipert-demo"), help="a folder"
                        " (pipert-demo)")  # fmt: skip
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join([f.read_bytes() for f in files])), dtype=torch.uint8)
    torch.manual_seed(0)
    devices = default_devices(2)
    devices *= 1 + (len(devices) == 1)
    n = len(devices)
    if devices[0].type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // n))
    blocks = [Block() for _ in range(3 * n)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256))
    balance = [3 + (j in (0, n - 1)) for j in range(n)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Pipe(model, balance, devices=devices, chunks=CHUNKS) as pipe:
        where = ", ".join(map(str, pipe.devices))
        print(f"A GPT learns Python's source code: {pipe.balance} layers on {where}")

        def step() -> float:
            starts = torch.randint(len(text) - CONTEXT, (ROWS, 1))
            windows = text[starts + torch.arange(CONTEXT + 1)].long()
            x, target = windows[:, :-1], windows[:, 1:]
            loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        begin, steps, said = time.monotonic(), 0, -1.0
        while (seconds := time.monotonic() - begin) < arguments.seconds or not steps:
            loss, steps = step(), steps + 1
            if seconds // 4 > said:
                said = seconds // 4
                print(f"{seconds:4.0f} s  step {steps:5}  loss {loss:.2f}", flush=True)
        with pipe.record() as timeline:
            losses = [step() for _ in range(2)]
    print(f"{seconds:4.0f} s  step {steps + 2:5}  loss {losses[-1]:.2f}\n")
    (out / "report.txt").write_text(f"{timeline.report()}\n")
    timeline.save(out / "trace.json")
    print(f"report:  {out / 'report.txt'}\ntrace:   {out / 'trace.json'}, for ui.perfetto.dev")
    if find_spec("matplotlib") is None:
        print("picture: needs matplotlib; pip install matplotlib, and run this again")
    else:
        timeline.plot(out / "picture.png", "two steps: a row for each device, a box for each task")
        print(f"picture: {out / 'picture.png'}")
    return 0
