"""Train a small GPT for weeks on a growing folder of text, in a process that may be killed.

    python examples/training_service.py --data texts --state state
    curl 127.0.0.1:9464/metrics
    curl 127.0.0.1:9464/healthz

However it stopped, restart it with the same command: it resumes from the last saved state and ends
bit for bit where it would have ended without the stop. It saves every ten steps (``--save-every``),
so a kill costs ten at most. It exits with code 0 after ``--steps``, and after SIGTERM or SIGINT,
once it has finished the step and saved; with code 3 if a step takes longer than ``--timeout``, when
it has logged what each worker was doing; with code 1 or 2 for other errors.

It needs the extras ``examples`` and ``prometheus``. See ``docs/running_for_weeks.md``.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import json
import logging as log
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
import torch
import train_gpt as gpt
from models.gpt import ModelConfig, build_model

from pipert import Pipe, PipelineTimeout
from pipert.prometheus import PipeMetrics


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes a state; it is complete or absent after a crash. Its checksum is in its name."""
    with (folder / "unfinished").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    checksum = zlib.crc32((folder / "unfinished").read_bytes())
    os.replace(folder / "unfinished", folder / f"step-{step:012}.{checksum:08x}.pt")
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)  # so that the name persists
    os.close(directory)
    for old in sorted(folder.glob("step-*.pt"))[:-3]:
        old.unlink()


def load(folder: Path) -> Any:
    """Loads the newest intact state; ``None`` if none was ever saved, an error if all are bad."""
    paths = sorted(folder.glob("step-*.pt"), reverse=True)
    for path in paths:
        if path.name.split(".")[1] == f"{zlib.crc32(path.read_bytes()):08x}":
            return torch.load(path, map_location="cpu", weights_only=True)
        log.error("refused: the bytes of %s are not those that were saved", path)
    if paths:
        raise RuntimeError(f"no saved state in {folder} is intact; delete them to begin anew")
    return None


class Training:
    """All that the next step depends on, and the step, which is done once or not at all."""

    def __init__(self, pipe: Pipe, options: argparse.Namespace) -> None:
        self.pipe, self.options, self.steps = pipe, options, 0
        self.optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.lr, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(  # has no end, as the service has none
            self.optimizer, lambda step: min((step + 1) / 100, 10 / (step + 1) ** 0.5)
        )
        self.parts = {name: getattr(self, name) for name in ("pipe", "optimizer", "scheduler")}
        self.sizes = dict[str, int]()  # of the files, as far as they are known
        fixed = (*asdict(ModelConfig()), "batch", "lr")  # which a resumed run must not change
        self.fixed = {name: getattr(options, name) for name in fixed}

    def read(self, sizes: dict[str, int] | None = None) -> None:
        """Reads the first bytes of each file: files may grow, but known text must not change."""
        folder = self.options.data
        if sizes is None:
            files = [file for file in sorted(folder.rglob("*")) if file.suffix in gpt.TEXT_SUFFIXES]
            sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
        if sizes != self.sizes:
            texts = [(folder / name).read_bytes()[:size] for name, size in sizes.items()]
            self.sizes, text = sizes, b"".join(texts)
            if len(text) <= self.options.context or len(text) < sum(sizes.values()):
                raise ValueError(f"there is too little text in {folder}, or less now")
            self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def step(self) -> float:
        """Trains on windows from anywhere in the text; returns their loss."""
        pipe, batch, context = self.pipe, self.options.batch, self.options.context
        starts = torch.randint(len(self.text) - context, (batch,))
        windows, random = gpt.cut_windows(self.text, starts, context), random_state()
        x, target, loss = windows[:, :-1], windows[:, 1:], None
        while loss is None:
            try:
                loss = pipe.forward_backward(x, target=target, loss_fn=gpt.next_byte_loss)
            except (torch.OutOfMemoryError, MemoryError):
                if pipe.chunks >= batch:
                    raise
            if loss is None:  # only here is the error gone, whose frames hold activations
                pipe.chunks = min(2 * pipe.chunks, batch)
                log.warning("out of memory: step=%d chunks=%d", self.steps + 1, pipe.chunks)
                self.optimizer.zero_grad()
                set_random_state(random)
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return float(loss)

    def state_dict(self) -> dict[str, Any]:
        """Returns only what ``torch.load(..., weights_only=True)`` accepts."""
        # The number of micro-batches decides who draws what, and in which order one adds up.
        own = {"steps": self.steps, "chunks": self.pipe.chunks, "random": random_state()}
        own |= {"sizes": self.sizes, "fixed": self.fixed}
        return own | {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        if state["fixed"] != self.fixed:
            raise ValueError(f"the saved state belongs to a run with {state['fixed']}")
        self.steps, self.pipe.chunks = state["steps"], state["chunks"]
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.read(state["sizes"])
        set_random_state(state["random"])
        return self.steps


def random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def set_random_state(state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    torch.cuda.set_rng_state_all(state[1 : 1 + torch.cuda.device_count()])


def serve(port: int, metrics: Any, problems: Callable[[], list[str]]) -> None:
    """Serves ``/metrics`` and ``/healthz`` on threads, which answer even while a step is stuck."""

    class Handler(prometheus.MetricsHandler):
        registry = metrics

        def do_GET(self) -> None:
            if self.path != "/healthz":
                return super().do_GET()
            found = problems()
            self.send_response(503 if found else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"problems": found}).encode())

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    log.info("serving: port=%d", server.server_address[1])


def run(pipe: Pipe, options: argparse.Namespace, stop: list[int]) -> None:
    """Trains from the last saved state, or from the beginning, until told to stop."""
    training, registry = Training(pipe, options), prometheus.CollectorRegistry()
    loss, moved, saved = float("nan"), time.monotonic(), -1
    PipeMetrics(registry).add(pipe, "training")
    shown = prometheus.Gauge("training_loss", "Of the last step, nats a byte", registry=registry)

    def problems() -> list[str]:
        idle, limit = time.monotonic() - moved, options.timeout / 5
        found = [f"no step was finished for {idle:.1f} s"] * (idle > limit)
        for worker in pipe.statistics().workers:
            task = worker.doing
            if task and task.phase != "waiting for input" and task.seconds > limit:
                at = f"partition {task.partition}, micro-batch {task.micro_batch}"
                found.append(f"{worker.name} has been at {at} for {task.seconds:.1f} s")
        return found

    serve(options.port, registry, problems)
    if state := load(options.state):
        saved = training.load_state_dict(state)
        log.info("resumed: step=%d", saved)
    while True:
        # What the pipe's timeout does not watch, such as the disk: ends with all stacks.
        faulthandler.dump_traceback_later(4 * options.timeout, exit=True, file=2)
        is_last = bool(stop) or training.steps >= (options.steps or float("inf"))
        is_due = training.steps % options.save_every == 0
        if training.steps != saved and (is_last or is_due):
            if is_due:  # only here, so that a resumed run draws from the same text
                training.read()
            save(options.state, saved := training.steps, training.state_dict())
            log.info("saved: step=%d loss=%.6f", saved, loss)
        if is_last:
            return log.info("stopped: step=%d signals=%s", training.steps, stop)
        loss, moved = training.step(), time.monotonic()
        shown.set(loss)


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; a wrong one exits with a message and code 2."""
    gpus = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a folder of text files; it may grow")
    add("--state", type=Path, required=True, help="a folder for the saved states of this run only")
    add("--steps", type=gpt.positive, help="end after this step; if omitted, never")
    add("--save-every", type=gpt.positive, default=10, help="steps, lost at most by a kill")
    add("--batch", type=gpt.positive, default=16, help="windows of text in a mini-batch")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--devices", type=gpt.devices, default=gpus or "cpu,cpu", help="one device per partition")
    add("--chunks", type=gpt.positive, default=4, help="micro-batches; raised if memory runs out")
    add("--port", type=int, default=9464, help="0 for any free port, which is logged")
    add("--timeout", type=float, default=600, help="seconds for a step; unhealthy after a fifth")
    for name, default in asdict(ModelConfig(dropout=0.1)).items():
        kind = gpt.positive if isinstance(default, int) else float
        add(f"--{name}", type=kind, default=default, help="see models/gpt.py")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the service with the options in ``argv``."""
    options, stop = read_options(argv), list[int]()
    log.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level="INFO")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop.append(number))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    options.state.mkdir(parents=True, exist_ok=True)
    config = ModelConfig(**{name: getattr(options, name) for name in asdict(ModelConfig())})
    gpt.share_cores(options.devices)
    with (options.state / "lock").open("wb") as lock, Pipe(
        build_model(config), gpt.even_balance(config.layers + 2, len(options.devices)),
        devices=options.devices, chunks=options.chunks, timeout=options.timeout,
    ) as pipe:  # fmt: skip
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another process has it
            run(pipe, options, stop)
        except PipelineTimeout:
            log.critical("stuck", exc_info=True)
            os._exit(3)  # closing the pipe would wait for the stuck worker


if __name__ == "__main__":
    main()
