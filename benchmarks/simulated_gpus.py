"""Runs the paper's experiments in virtual time: whole steps on simulated GPUs, in one process.

::

    python benchmarks/simulated_gpus.py                       # all tables
    python benchmarks/simulated_gpus.py speed --only unet,gpt
    python benchmarks/simulated_gpus.py --short --check       # for CI

The plain module on one device, torchgpipe and pipert take the same step on devices of the same
speed. The runtimes are real; only the devices' clocks are simulated (``_virtual.py``), so nothing
in these tables was measured on a GPU. Figures are medians of ``--repeats`` steps. pipert's steps
all take the same time, because its order does not depend on thread timing. *spread* is the row's
largest ratio of the longest step to the shortest, minus one.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]

from _virtual import GPUS, MODES, PLAIN, Case, Machine, Steps, Way, ideal, measure  # noqa: E402

# isort: split
import _virtual_ablation as ablation  # noqa: E402
import _virtual_host as host  # noqa: E402
import torch  # noqa: E402
from _ablation import PARTS  # noqa: E402
from _measure import Row, header, report, verdict  # noqa: E402
from _virtual_models import WORKLOADS, Workload  # noqa: E402
from tqdm import tqdm  # noqa: E402

__all__ = ["main"]

SHORT = ((4, 8),)  # n, m
RUNTIMES = (
    ("torchgpipe", "autograd"), ("pipert", "autograd"), ("pipert", "gpipe"), ("pipert", "1f1b"),
    ("pipert", "zb-h1"), ("pipert", "zb-h2"),
)  # fmt: skip
PLANS = tuple(schedule for _, schedule in RUNTIMES if schedule != "autograd")
OF_IDEAL = 0.97  # the lowest permitted speed-up of sleeping stages, as a fraction of the ideal

Figures = dict[str, Any]


def speed(
    workload: Workload, sizes: Sequence[tuple[int, int]], repeats: int, step: Callable[[], object]
) -> tuple[list[Row], list[Figures]]:
    """Measures speed-ups over the plain module on one device; calls ``step`` after each figure."""
    machine = workload.rates()
    table, found = [], []
    for n, m in sizes:
        case = workload.case(n, m)
        plain = measure(case, PLAIN, machine, repeats)
        for mode in MODES:
            took = {}
            for runtime, schedule in RUNTIMES:
                way = Way(runtime, mode, schedule)
                took[way] = measure(case, way, machine, repeats)
                step()
            ups = [plain.median / steps.median for steps in took.values()]
            spread = max(steps.spread for steps in [plain, *took.values()])
            cells = (f"n={n} m={m}, {mode}", f"{ideal(m, n):.2f}", *(f"{up:.2f}" for up in ups))
            table.append(Row((*cells, f"{spread:.0%}"), tuple(_missed(workload, case, mode, ups))))
            found.append(_figures(workload, case, mode, plain, took))
    return table, found


def _missed(workload: Workload, case: Case, mode: str, ups: Sequence[float]) -> list[str]:
    """Describes the bars that were missed."""
    peer, autograd, *_ = ups
    name = f"{workload.name}, n={case.n} m={case.m}, {mode}"
    missed = []
    if mode == "never" and autograd < 0.999 * peer:
        missed.append(f"{name}: pipert has {autograd:.3f}, torchgpipe {peer:.3f}")
    most = ideal(case.m, case.n)
    if workload is WORKLOADS["sleeping"] and mode == "never" and autograd < OF_IDEAL * most:
        missed.append(f"{name}: {autograd:.3f} of {most:.3f}")
    return missed


def _figures(
    workload: Workload, case: Case, mode: str, plain: Steps, took: dict[Way, Steps]
) -> Figures:
    return {
        "model": workload.name, "n": case.n, "m": case.m, "balance": list(case.balance),
        "mode": mode, "ideal": ideal(case.m, case.n), "plain_ms": plain.each,
        "steps_ms": {str(way): steps.each for way, steps in took.items()},
    }  # fmt: skip


def speeds(arguments: argparse.Namespace) -> tuple[list[str], list[Figures]]:
    """Prints a table of speed-ups for each model."""
    missed: list[str] = []
    all_found = []
    for name in arguments.only:
        workload = WORKLOADS[name]
        sizes = SHORT if arguments.short else workload.sizes
        total = len(sizes) * len(MODES) * len(RUNTIMES)
        with tqdm(total=total, desc=name, unit="figure", mininterval=5) as bar:
            table, found = speed(workload, sizes, arguments.repeats, bar.update)
        columns = ("case", "ideal", "torchgpipe", "pipert", *PLANS, "spread")
        missed += report(_title(workload.name, workload.rates()), columns, table)
        all_found += found
    return missed, all_found


def _title(name: str, machine: Machine) -> str:
    return f"{name}: simulated, speed-up over the plain module on one device ({machine})"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("tables", nargs="*", default=list(TABLES), metavar="table", help=", ".join(TABLES))
    add("--only", type=lambda text: text.split(","), default=list(WORKLOADS),
        help=f"models to run, of {','.join(WORKLOADS)}")
    add("--check", action="store_true", help="exit with 1 when a bar is missed")
    add("--short", action="store_true", help="fewer sizes, for CI")
    add("--host-us", type=lambda text: None if text == "auto" else float(text), default=None,
        help="for table host: cost of a launch; auto, the default, measures it")
    add("--repeats", type=int, default=3, help="steps per figure")
    add("--no-detect", action="store_true", help="do not look for missing waits, which is faster")
    add("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args(argv)
    for name in arguments.tables:
        if name not in TABLES:
            parser.error(f"there is no table {name!r}: {', '.join(TABLES)}")
    for name in arguments.only:
        if name not in WORKLOADS:
            parser.error(f"there is no model {name!r}: {', '.join(WORKLOADS)}")
    return arguments  # fmt: skip


def ablations(arguments: argparse.Namespace) -> tuple[list[str], list[Figures]]:
    """Prints what each part is worth, for each case."""
    all_found = []
    models = [WORKLOADS[name] for name in arguments.only]
    cases = [one for one in ablation.ABLATIONS if one.workload in models]
    cases = cases[: 1 if arguments.short else None]
    with tqdm(total=len(cases) * len(PARTS), desc="ablation", mininterval=5) as bar:
        for one in cases:
            table, found = ablation.table(one, arguments.repeats, bar.update)
            title = f"{one}: simulated, speed-up over the clock alone ({one.machine})"
            report(title, ablation.COLUMNS, table)
            all_found += found
    return [], all_found


def hosts(arguments: argparse.Namespace) -> tuple[list[str], list[Figures]]:
    """Prints what a step takes if launches cost time."""
    us = host.launch_us() if arguments.host_us is None else arguments.host_us
    print(f"A launch costs {us:.1f} us of the host.", end="\n\n")
    with tqdm(desc="host", mininterval=5) as bar:
        table, found = host.table(us, arguments.repeats, bar.update, short=arguments.short)
    title = "AmoebaNet-D (18, 256), 16 samples, never: simulated, milliseconds of a step"
    report(title, host.COLUMNS, table)
    return [], found


Table = Callable[[argparse.Namespace], tuple[list[str], list[Figures]]]
TABLES: dict[str, Table] = {"speed": speeds, "ablation": ablations, "host": hosts}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if a wait was missing, or under ``--check`` a bar was missed."""
    arguments = _arguments(argv)
    # torchgpipe 0.0.7 uses a deprecated way to get the storage of a tensor.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    torch.set_num_threads(1)
    print(header(), "Simulated GPUs: nothing here was measured on one.", sep="\n", end="\n\n")
    GPUS.detect(not arguments.no_detect)
    missed: list[str] = []
    figures = {}
    for name in arguments.tables:
        missed_in_table, figures[name] = TABLES[name](arguments)
        missed += missed_in_table
    reports = GPUS.reports()
    if arguments.json is not None:
        given = {"versions": header(), "reports": len(reports), "rates": _rates(arguments)}
        arguments.json.write_text(json.dumps({**given, **figures}, indent=1), encoding="utf-8")
    if arguments.no_detect:
        print("Missing waits: not looked for.")
    looked = None if arguments.no_detect else reports
    return verdict(missed, check=arguments.check, reports=looked)


def _rates(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: asdict(WORKLOADS[name].rates()) for name in arguments.only}


if __name__ == "__main__":
    sys.exit(main())
