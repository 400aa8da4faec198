"""Measures pipert on this machine's GPUs, and writes a page and a file of figures.

``python benchmarks/on_gpu.py --out results`` takes at most nine minutes and needs torch alone.
Whatever else is installed adds to it: with transformers the model is a Llama, with pytest the tests
marked ``cuda`` run, with torchgpipe and tqdm the U-Net of the paper runs beside torchgpipe, on
several GPUs in each of the paper's settings that fits them.

With one GPU both partitions share it. Without any, two CPU workers take its place, which tries the
program and says nothing of GPUs. All times but those of programs are medians of steps that take
turns, up to the moment when the devices have nothing left to do. Models are small: their kernels
are shorter than the Python that launches them, so their times are what the host pays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import pipert
from pipert.check import description, gpus_of

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 9.0
M = 4
"""Micro-batches of a step."""


@dataclass
class Section:
    """What one measurement found: a table, the output of a program, or why there is neither."""

    title: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    text: str = ""
    failed: bool = False

    def page(self) -> str:
        lines = [f"## {self.title}", ""]
        if self.columns:
            cells = [self.columns, tuple("---" for _ in self.columns), *self.rows]
            lines += [*[f"| {' | '.join(row)} |" for row in cells], ""]
        if self.text:
            lines += ["```text", self.text.strip(), "```", ""]
        return "\n".join(lines)


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), dropout
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.feed = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + F.dropout(self.out(seen), self.dropout, self.training)
        y: Tensor = x + F.dropout(self.feed(x), self.dropout, self.training)
        return y


class Decoder(nn.Module):
    """A model that runs its own forward, for machines without transformers."""

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = recomputed(layer, x, use_reentrant=True) if self.recomputes else layer(x)
        y: Tensor = self.head(x)
        return y


@dataclass
class Subject:
    """A model, its cuts, and how it is called."""

    make: Callable[[], nn.Module]
    name: str
    layers: int
    prefix: str
    x: Tensor
    call: Callable[[nn.Module, Tensor], Tensor]
    """Returns the logits."""
    recompute: Callable[[nn.Module], object]
    """Turns on torch's reentrant checkpoint around each layer."""


def subject(device: torch.device, layers: int, width: int, dropout: float = 0.0) -> Subject:
    """A Llama of transformers if that is there, or else a model of this file's."""
    x = torch.randint(1, 256, (4 * M, 8), device=device)
    if importlib.util.find_spec("transformers") is None:
        return Subject(
            lambda: Decoder(layers, width, dropout).to(device), "a decoder", layers, "layers", x,
            lambda model, x: model(x), lambda model: setattr(model, "recomputes", True),
        )  # fmt: skip
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=256, pad_token_id=0,
        attention_dropout=dropout,
    )  # fmt: skip

    def recompute(model: Any) -> None:
        reentrant = {"use_reentrant": True}
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)

    return Subject(
        lambda: LlamaForCausalLM(config).to(device), "a Llama of transformers", layers,
        "model.layers", x, lambda model, x: model(input_ids=x, use_cache=False).logits,
        recompute,
    )  # fmt: skip


def loss_of(output: Any, target: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def generate(model: Any, x: Tensor) -> None:
    model.generate(x, max_new_tokens=6, min_new_tokens=6, do_sample=False)


class Program:
    """All measurements of one run.

    Args:
        devices: where the partitions are.
        short: whether to try each measurement, rather than to measure.
        out: the folder of the results.
    """

    def __init__(self, devices: Sequence[torch.device], short: bool, out: Path) -> None:
        self.devices, self.short, self.out = devices, short, out
        self.first, self.n, self.gpus = devices[0], len(devices), gpus_of(devices)
        self.deadline = time.monotonic() + 60 * MINUTES

    def sections(self) -> Iterator[Callable[[], Section]]:
        yield from (self.host, self.one_micro_batch, self.peaks, self.repeats, self.apart)
        yield from (self.check, self.unet, self.tests)

    # Steps

    def times(self, ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        """Return the median seconds of each way; they take turns."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(1 if self.short else repeats + 2):
            for name, way in ways.items():
                self.synchronize()
                started = time.perf_counter()
                way()
                self.synchronize()
                seconds = time.perf_counter() - started
                if turn >= 2 or self.short:
                    taken[name].append(seconds)
        return {name: median(seconds) for name, seconds in taken.items()}

    def synchronize(self) -> None:
        """Wait until all GPUs are idle."""
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)

    def pipe(self, given: Subject, model: nn.Module, checkpoint: str) -> pipert.ModulePipe:
        n = self.n
        cuts = [f"{given.prefix}.{given.layers * j // n}" for j in range(1, n)]
        return pipert.pipeline(
            model, cuts, devices=list(self.devices), chunks=M, checkpoint=checkpoint
        )

    def arguments(self, given: Subject) -> dict[str, Any]:
        if given.prefix == "layers":
            return {"x": given.x}
        return {"input_ids": given.x, "use_cache": False}

    def host(self) -> Section:
        """What the host pays for each layer of any model, recomputed and not."""
        layers = 4 * self.n if self.short else 16
        found = Section(
            "Host cost of a layer of any model, microseconds for each micro-batch",
            ("checkpoint", "dropout", "way", "us", "of"),
        )
        for checkpoint in ("never", "always"):
            for dropout in (0.0, 0.1):
                given = subject(self.first, layers, 64, dropout)
                found.rows += self._host_rows(given, checkpoint, dropout)
        found.title += f" ({given.name} of {layers} layers)"
        return found

    def _host_rows(self, given: Subject, checkpoint: str, dropout: float) -> list[tuple[str, ...]]:
        beside = "plain" if checkpoint == "never" else "torch's checkpoint"
        plain = given.make().train()
        model = deepcopy(plain)
        if checkpoint == "always":
            given.recompute(plain)
        whole = self.arguments(given)

        def step() -> None:
            for part in given.x.chunk(M):
                torch.autograd.backward(loss_of(given.call(plain, part), part))

        with self.pipe(given, model, checkpoint) as pipe:

            def in_pipe(schedule: str) -> Callable[[], object]:
                return lambda: pipe.forward_backward(
                    **whole, target=given.x.to(pipe.devices[-1]), loss_fn=loss_of, schedule=schedule
                )

            ways: dict[str, Callable[[], object]] = {
                beside: step,
                "call": lambda: torch.autograd.backward(
                    loss_of(pipe(**whole), given.x.to(pipe.devices[-1]))
                ),
                **{name: in_pipe(name) for name in ("1f1b", "zb-h1")},
            }
            seconds = self.times(ways, 15)
        each = 1e6 / (given.layers * M)
        return [
            (checkpoint, f"{dropout}", name, f"{each * s:.0f}", f"{s / seconds[beside]:.2f}")
            for name, s in seconds.items()
        ]

    def one_micro_batch(self) -> Section:
        """A call of one micro-batch, and ``generate``, in the pipe and of the plain model."""
        layers = 4 * self.n if self.short else 16
        given = subject(self.first, layers, 64)
        plain = given.make().eval()
        model = deepcopy(plain)
        one = given.x[:4]
        with self.pipe(given, model, "never"), torch.no_grad():
            ways: dict[str, Callable[[], object]] = {
                "plain call": lambda: given.call(plain, one),
                "call": lambda: given.call(model, one),
            }
            if given.prefix != "layers":
                ways |= {
                    "plain generate": partial(generate, plain, one),
                    "generate": partial(generate, model, one),
                }
            seconds = self.times(ways, 15)
        rows: list[tuple[str, ...]] = [
            (name, f"{1e3 * s:.2f}", f"{s / seconds[f'plain {name}']:.2f}")
            for name, s in seconds.items() if not name.startswith("plain")
        ]  # fmt: skip
        return Section(f"One micro-batch without gradients ({given.name})",
                       ("way", "ms", "of plain"), rows)  # fmt: skip

    def peaks(self) -> Section:
        """Peak memory of steps, beyond what was allocated before."""
        columns = ("schedule", "checkpoint", *map(str, self.gpus))
        found = Section("Peak memory of a step of eight micro-batches, MiB", columns)
        if not self.gpus:
            found.text = "no CUDA device: torch does not count memory on a CPU"
            return found
        width, rows = (32, 64) if self.short else (2048, 4096)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16)]
        n = self.n
        balance = [16 * (j + 1) // n - 16 * j // n for j in range(n)]
        x = torch.randn(rows, width, device=self.first)
        for checkpoint in ("never", "always"):
            with pipert.Pipe(nn.Sequential(*layers), balance, devices=self.devices,
                             chunks=8, checkpoint=checkpoint) as pipe:  # fmt: skip
                for schedule in ("gpipe", "1f1b"):
                    for _ in range(2):  # the first makes workspaces and gradients
                        before = [torch.cuda.memory_allocated(gpu) for gpu in self.gpus]
                        for gpu in self.gpus:
                            torch.cuda.reset_peak_memory_stats(gpu)
                        pipe.forward_backward(
                            x, loss_fn=lambda y, _: y.square().mean(), schedule=schedule
                        )
                        self.synchronize()
                    now = [torch.cuda.max_memory_allocated(gpu) for gpu in self.gpus]
                    pairs = zip(now, before, strict=True)
                    sizes = [f"{(peak - start) / 2**20:.2f}" for peak, start in pairs]
                    found.rows.append((schedule, checkpoint, *sizes))
        return found

    def repeats(self) -> Section:
        """Steps from one seed, which must have the same bits."""
        given = subject(self.first, 2 * self.n, 64, dropout=0.1)
        begun = given.make().train()
        columns = ("schedule", "checkpoint", "same")
        found = Section("Steps from one seed, compared bit by bit", columns)
        for checkpoint in ("never", "always"):
            with self.pipe(given, deepcopy(begun), checkpoint) as pipe:
                for schedule in ("gpipe", "1f1b", "zb-h1"):
                    seen = []
                    for _ in range(3):
                        torch.manual_seed(7)
                        pipe.zero_grad()
                        loss = pipe.forward_backward(
                            **self.arguments(given), target=given.x.to(pipe.devices[-1]),
                            loss_fn=loss_of, schedule=schedule,
                        )  # fmt: skip
                        gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
                        seen.append([loss.detach(), *[g.clone() for g in gradients]])
                    same = all(all(map(torch.equal, seen[0], other)) for other in seen[1:])
                    found.rows.append((schedule, checkpoint, "yes" if same else "NO"))
                    found.failed |= not same
        return found

    def apart(self) -> Section:
        """``B`` and ``W`` of a stage of Linears, of its whole backward."""
        found = Section("B and W apart, of the whole backward of 100 Linears",
                        ("width", "rows", "whole, ms", "apart, ms", "of whole"))  # fmt: skip
        for width, rows in ((16, 16),) if self.short else ((16, 16), (512, 512), (2048, 4096)):
            layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(100)])
            x = torch.randn(rows, width, device=self.first)
            taken: dict[str, list[float]] = {"1f1b": [], "zb-h1": []}
            with pipert.Pipe(layers, [100], devices=[self.first], chunks=1,
                             checkpoint="never") as pipe:  # fmt: skip
                for turn in range(2 if self.short else 9):
                    for schedule, seconds in taken.items():
                        with pipe.record() as timeline:
                            pipe.forward_backward(
                                x, loss_fn=lambda y, _: y.square().mean(), schedule=schedule
                            )
                        kinds = ("backward", "weight gradient")
                        events = [e.seconds for e in timeline.events if e.kind in kinds]
                        seconds += [sum(events)] * (turn > 0)
            whole, apart = (1e3 * median(seconds) for seconds in taken.values())
            found.rows.append((f"{width}", f"{rows}", f"{whole:.2f}", f"{apart:.2f}",
                               f"{apart / whole:.2f}"))  # fmt: skip
        return found

    # Programs

    def check(self) -> Section:
        """``python -m pipert check``."""
        names = ",".join(map(str, self.devices))
        return self.run("The check", ["-m", "pipert", "check", "--devices", names,
                                      *(["--quick"] if self.short else [])])  # fmt: skip

    def unet(self) -> Section:
        """The paper's U-Net beside torchgpipe."""
        title = "The paper's U-Net, beside torchgpipe"
        if lacking := [k for k in ("torchgpipe", "tqdm") if importlib.util.find_spec(k) is None]:
            return Section(title, text=f"not run: no {' and no '.join(lacking)} here")
        names = ",".join(map(str, self.devices))
        scale = ["--scale", "tiny"] if self.short else []
        file = ["--json", str(self.out / "unet.json")]
        script = str(ROOT / "benchmarks" / "speed.py")
        return self.run(title, [script, "unet", "--devices", names, "--steps", "1", *scale, *file])

    def tests(self) -> Section:
        """The tests marked ``cuda``, on one GPU those that need no more."""
        title = "Tests marked cuda"
        if importlib.util.find_spec("pytest") is None or not self.gpus:
            return Section(title, text="not run: no pytest, or no GPU, here")
        marked = "cuda" if torch.cuda.device_count() > 1 else "cuda and not multi_gpu"
        which = ["tests/cuda/test_cuda.py"] if self.short else []
        return self.run(title, ["-m", "pytest", "-q", "-m", marked, *which], last=12)

    def run(self, title: str, arguments: list[str], last: int | None = None) -> Section:
        """Run a Python program with the time that is left; return the end of its output."""
        left = max(1.0, self.deadline - time.monotonic())
        path = filter(None, [os.environ.get("PYTHONPATH")])
        broken_off = ""
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT, capture_output=True, text=True, timeout=left,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])},
            )  # fmt: skip
            text, failed = done.stdout, done.returncode != 0
            if failed:
                text += done.stderr
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            text, failed = output.decode() if isinstance(output, bytes) else output, True
            broken_off = f"\nbroken off after {left:.0f} s: no time was left"
        kept = text.strip().splitlines()
        return Section(title, text="\n".join(kept[-last:] if last else kept) + broken_off,
                       failed=failed)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run all measurements; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for on_gpu.md and .json")
    parser.add_argument("--devices", help="of the partitions, such as cuda:0,cuda:1 (default: all)")
    parser.add_argument("--short", action="store_true", help="try everything, measure nothing")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["cpu"]
    names = arguments.devices.split(",") if arguments.devices else gpus
    devices = list(map(torch.device, names * 2 if len(names) == 1 else names))
    program = Program(devices, arguments.short, arguments.out)
    remarks = ["--short: tried, not measured"] if arguments.short else []
    about = [*description(devices), *remarks]
    found = []
    for measure in program.sections():
        begin = time.monotonic()
        try:
            if begin > program.deadline:
                raise TimeoutError(f"no time was left: {MINUTES:.0f} minutes are over")
            section = measure()
        except Exception:  # printed; the others are still worth running
            text = traceback.format_exc()
            section = Section((measure.__doc__ or "").strip(), text=text, failed=True)
        found.append(section)
        print(section.page(), f"({time.monotonic() - begin:.0f} s)", "", sep="\n", flush=True)
        write(arguments.out, about, found)
    failed = [section.title for section in found if section.failed]
    print(f"Failed: {', '.join(failed)}" if failed else "Nothing failed.")
    return bool(failed)


def write(out: Path, about: list[str], found: list[Section]) -> None:
    """Write the page and the figures; after each section, in case the machine is taken away."""
    lines = ["# pipert on a GPU", "", *[f"* {line}" for line in about], ""]
    page = "\n".join([*lines, *[section.page() for section in found]])
    (out / "on_gpu.md").write_text(page, encoding="utf-8")
    figures = {"about": about, "sections": [asdict(section) for section in found]}
    (out / "on_gpu.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
