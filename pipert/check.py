"""Compares pipes with plain modules on this machine's devices: ``python -m pipert check``.

A missing wait shows as a value that changes now and then, when a device reads data that has not
arrived. So steps are repeated from one seed, with dropout and under load: the chain's copies take
as long as its layers, and the devices are never idle in between.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import math
import os
import platform
import traceback
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import collect_env

import pipert
from pipert.model.devices import parse_devices, where_tensors_are

HOLDS, BROKEN, NOT_CHECKED = "holds", "DOES NOT HOLD", "not checked"
NO_GPU = "no CUDA device: checking CPU workers instead; this says nothing about GPUs"
ONE_GPU = "one GPU: copies between GPUs cannot be checked"
VALUES_MEAN = (
    "do not train with pipert here: it computes something different from the plain module. If"
    " copies by torch alone are wrong, too, look at the machine's settings of ACS and IOMMU"
)
BITS_MEAN = "a seed does not reproduce a step. If values do not hold either, a wait is missing"
MODES_MEAN = "a mode does not save the memory that it is there for: models that should fit may not"
FLAT_MEANS = "each step leaves something behind: a training runs out of memory sooner or later"
CRASH_MEANS = "there is an error where none should be, or too little memory: see stderr"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to each tensor's largest entry
BELOW = 0.9  # of the other's peak must a mode need that promises less; half or less is expected
QUICK, ON_CPU, ON_GPUS = (2, 32, 64), (6, 256, 256), (6, 4096, 512)  # repeats, width, rows
PIPES, CALL = ("Pipe", "pipeline"), "loss.backward()"
WAYS = {
    f"{schedule}, checkpoint={mode!r}": (schedule, mode)
    for schedule in (CALL, "gpipe", "1f1b") for mode in ("never", "except_last", "always")
}  # fmt: skip
SPARING = [((s, "always"), (s, "never")) for s in (CALL, "gpipe")]
SPARING += [(("1f1b", "never"), (s, "never")) for s in (CALL, "gpipe")]
Devices = Sequence[torch.device]
Results = dict[str, Tensor | None]
Case = tuple[nn.Sequential, Tensor, Tensor, int]  # layers, input, target and chunks, on the CPU


class Finding(NamedTuple):
    """A line of the report: a check, its outcome, and what was seen."""

    check: str
    outcome: str
    seen: str


def judged(check: str, faults: list[str], seen: str, means: str) -> Finding:
    """Makes a finding that holds if there are no ``faults``; it names the first few of them."""
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    named = f"{'; '.join(faults[:3])}{more}. That means: {means}"
    return Finding(check, BROKEN, named) if faults else Finding(check, HOLDS, seen)


def transformer(n: int) -> Case:
    """Makes ``n`` blocks, a head that shares the embedding's weight, and a layer that is in-place.

    All is smooth: where ReLU chooses between values that differ by rounding, a gradient jumps.
    """
    torch.manual_seed(0)
    embedding, head = nn.Embedding(8, 16), nn.Linear(16, 8)
    head.weight = embedding.weight
    block = nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True)
    blocks = [copy.deepcopy(block) for _ in range(n)]
    layers = nn.Sequential(embedding, nn.ELU(inplace=True), *blocks, head).double()
    tokens = torch.randint(8, (10, 12))  # micro-batches of 3, 3, 2 and 2
    return layers, tokens, torch.randn(10, 12, 8, dtype=torch.float64), 4


def chain(n: int, m: int, depth: int, width: int, rows: int, dropout: float = 0.0) -> Case:
    """Makes ``n`` equal layers; without dropout each level saves a tensor like its input."""
    torch.manual_seed(0)
    drop = [nn.Dropout(dropout)] if dropout else []
    levels = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), *drop) for _ in range(n * depth)]
    layers = nn.Sequential(*(nn.Sequential(*levels[j::n]) for j in range(n)))
    x, target = torch.randn(2, m * rows, width)
    return layers, x, target, m


class Trial:
    """A copy of a model, in a pipe of one kind or, without a kind, on the first device."""

    def __init__(self, case: Case, devices: Devices, kind: str = "") -> None:
        model, x, target, chunks = copy.deepcopy(case)
        starts = [len(model) * j // len(devices) for j in range(len(devices) + 1)]
        on: Any = {"devices": devices, "chunks": chunks, "timeout": 60.0}
        if kind == "Pipe":
            self.pipe: Any = pipert.Pipe(model, [b - a for a, b in pairwise(starts)], **on)
        elif kind == "pipeline":
            self.pipe = pipert.pipeline(model, map(str, starts[1:-1]), **on)
        else:
            self.pipe = model.to(devices[0])
        self.x = x.to(devices[0]).requires_grad_(x.is_floating_point())
        self.leaves = {**dict(model.named_parameters()), "the input": self.x}
        self.target = target.to(devices[-1 if kind else 0])

    def step(self, schedule: str, mode: str) -> Results:
        """Runs a step from a seed; returns its output, its loss and all gradients, in no graph."""
        torch.manual_seed(7)
        self.pipe.checkpoint = mode
        if schedule == CALL:
            output = self.pipe(self.x)
            loss = mse_loss(output, self.target)
            torch.autograd.backward(loss)
        else:
            loss, output = self.pipe.forward_backward(
                self.x, target=self.target, loss_fn=mse_loss, schedule=schedule, return_outputs=True
            )
        found = {"output": output.detach(), "loss": loss.detach()}
        for name, tensor in self.leaves.items():
            found[f"the gradient of {name}"], tensor.grad = tensor.grad, None
        return found


def trials(case: Case, devices: Devices) -> Iterator[tuple[str, Trial]]:
    """Puts a model into a pipe of each kind, one after the other."""
    for kind in PIPES:
        trial = Trial(case, devices, kind)
        with trial.pipe:
            yield kind, trial


def check_values(name: str, case: Case, devices: Devices, _: int) -> Iterator[Finding]:
    """Compares a model in each way with the plain module on the first device."""
    expected, found = Trial(case, devices).step(CALL, ""), {}
    for kind, trial in trials(case, devices):
        with torch.no_grad():
            evaluated: Results = {"output": trial.pipe(trial.x)}
        found[f"{kind}, without gradients"] = difference(evaluated, expected)
        for way, how in WAYS.items():
            found[f"{kind}, {way}"] = difference(trial.step(*how), expected)
    allowed, worst = TOLERANCE[case[2].dtype], max(found.values())[0]
    faults = [
        f"{way}: {entry} differs by {amount:.1e} of its largest entry"
        for way, (amount, entry) in found.items() if amount > allowed
    ]  # fmt: skip
    seen = f"{len(found)} ways; largest difference {worst:.0e}, allowed {allowed:.0e}"
    yield judged(name, faults, seen, VALUES_MEAN)


def check_repeats(name: str, case: Case, devices: Devices, repeats: int) -> Iterator[Finding]:
    """Repeats steps from one seed in each way, and compares all bits."""
    faults = []
    for kind, trial in trials(case, devices):
        for way, how in WAYS.items():
            # All steps run before any result is read, so the host does not wait between them.
            first, *others = [trial.step(*how) for _ in range(repeats)]
            if different := sum(difference(other, first)[0] > 0.0 for other in others):
                faults.append(f"{kind}, {way}: {different} of {len(others)} have other bits")
    seen = f"{len(PIPES) * len(WAYS)} ways, {repeats} times each: the same bits"
    yield judged(name, faults, seen, BITS_MEAN)


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """Returns the largest difference relative to the tensor's largest entry, and its name."""
    # Compared on the CPU, since a link between GPUs may be broken.
    right = {name: tensor.cpu().double() for name, tensor in expected.items() if tensor is not None}
    sizes = {name: float(tensor.abs().max()) for name, tensor in right.items()}
    # A gradient may be zero except for rounding.
    floor = max([1e-3 * size for name, size in sizes.items() if "gradient" in name], default=0.0)
    worst = (0.0, "nothing")
    for name, tensor in found.items():
        amount = 0.0 if tensor is None and name not in right else math.inf
        if tensor is not None and name in right:
            apart = float((tensor.cpu().double() - right[name]).abs().max())
            amount = apart / max(sizes[name], floor, 1e-300) if apart == apart else math.inf  # NaN
        worst = max(worst, (amount, name), key=lambda one: one[0])
    return worst


def check_memory(name: str, case: Case, devices: Devices, repeats: int) -> Iterator[Finding]:
    """Checks peaks, and that a later step leaves no more than an earlier one did on any GPU."""
    gpus, high, grown = gpus_of(devices), list[str](), list[str]()
    if not gpus:
        yield Finding(name, NOT_CHECKED, "no CUDA device: torch does not count on a CPU")
        return
    for kind, trial in trials(case, devices):
        peaks = {}
        for way, how in WAYS.items():
            sizes = [memory_of(trial, how, gpus) for _ in range(2 * repeats)]
            for k, gpu in enumerate(gpus):
                before = [of_gpus[k][0] for of_gpus in sizes]
                peaks[how, gpu] = (sizes[-1][k][1] - before[-1]) / 2**20
                # A worker may still hold its last task for a moment when a step is over.
                more = min(before[repeats:]) - max(before[:repeats])
                if more > 0:
                    grown.append(f"{kind}, {way}: {more} bytes more on {gpu}")
        high += [
            f"{kind}, {gpu}: {less} needs {peaks[less, gpu]:.1f} MiB, {more} {peaks[more, gpu]:.1f}"
            for less, more in SPARING for gpu in gpus
            if peaks[less, gpu] >= BELOW * peaks[more, gpu]
        ]
    seen = "'always' needs less than 'never', and 1f1b less than the others, on each GPU"
    yield judged("peak memory", high, seen, MODES_MEAN)
    seen = f"{2 * repeats} steps of each way leave no more than before"
    yield judged("memory stays the same over steps", grown, seen, FLAT_MEANS)


def memory_of(trial: Trial, how: tuple[str, str], gpus: Devices) -> list[tuple[int, int]]:
    """Runs a step; returns for each GPU the bytes in use before it and at its peak."""
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    trial.step(*how)
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return [*zip(before, map(torch.cuda.max_memory_allocated, gpus), strict=True)]


def gpus_of(devices: Devices) -> list[torch.device]:
    """Returns the CUDA devices, each once."""
    return [*dict.fromkeys(device for device in devices if device.type == "cuda")]


def description(devices: Devices) -> list[str]:
    """Returns lines about the software, and about each device."""
    driver = collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]
    lines = [
        f"pipert {pipert.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"NVIDIA driver {driver}, Python {platform.python_version()}, {platform.platform()}, "
        f"{os.cpu_count()} cores; partitions on {', '.join(map(str, devices))}"
    ]
    for gpu in gpus_of(devices):
        free, size = (amount / 2**30 for amount in torch.cuda.mem_get_info(gpu))
        lines.append(f"{gpu}: {torch.cuda.get_device_name(gpu)}, {free:.1f} of {size:.1f} GiB free")
    return lines


def run(devices: Devices, repeats: int, width: int, rows: int) -> Iterator[Finding]:
    """Run all checks. A check that raises becomes a finding, and the next one runs."""
    n = len(devices)
    for name, check, case in (
        ("values (transformer)", check_values, transformer(n)),
        ("values (chain)", check_values, chain(n, 2 * n, 1, width, rows)),
        ("repeated steps", check_repeats, chain(n, 2 * n, 1, width, rows, dropout=0.2)),
        ("peak memory", check_memory, chain(n, max(8, 2 * n), 8, min(256, width), 8 * rows)),
    ):
        try:
            yield from check(name, case, devices, repeats)
        except Exception as error:  # the other checks are still worth running
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            yield judged(name, [said], "", CRASH_MEANS)


def add_parser(tools: Any) -> None:
    """Add ``check`` to the tools of ``python -m pipert``."""
    parser = tools.add_parser(
        "check",
        help="check pipert on the devices of this machine",
        description="Compare pipes with plain modules on the devices of this machine, read memory,"
        " and print a report in Markdown. Exit status 1 if something does not hold.",
    )
    gpus = ",".join(f"cuda:{k}" for k in range(torch.cuda.device_count()))
    parser.add_argument("--devices", default=gpus or "cpu", help="of the partitions, such as"
                        " cuda:0,cuda:1,cpu; a single one gets two (%(default)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.set_defaults(run=lambda arguments: _check(arguments, parser))


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        names = [name.strip() for name in arguments.devices.split(",")]
        devices = where_tensors_are(parse_devices(names * 2 if len(names) == 1 else names))
    except (ValueError, RuntimeError) as error:  # torch raises the latter
        parser.error(f"--devices: {error}")
    settle(devices)
    remarks = {0: [NO_GPU], 1: [ONE_GPU]}.get(len(gpus_of(devices)), [])
    lines = [f"* {line}" for line in [*description(devices), *remarks]]
    print("## pipert check", "", *lines, "", sep="\n")
    broken, on_cpu = 0, torch.device("cpu") in devices
    for finding in run(devices, *(QUICK if arguments.quick else ON_CPU if on_cpu else ON_GPUS)):
        print(f"* **{finding.outcome}** {finding.check}: {finding.seen}", flush=True)
        broken += finding.outcome == BROKEN
    print("", f"{broken or 'No'} check{'s' * (broken != 1)} failed.", sep="\n")
    return 1 if broken else 0


def settle(devices: Devices) -> None:
    """Makes cuBLAS deterministic, gives CPU workers a core each, and ends a process that hangs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    torch.backends.cuda.matmul.allow_tf32 = False
    if not gpus_of(devices):
        torch.set_num_threads(1)
    faulthandler.dump_traceback_later(600, exit=True, file=2)
