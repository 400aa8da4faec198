"""Defines the Prometheus metrics of the training, and adds those of its pipe and process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from ranks import AnyPipe

from pipert.prometheus import PipeMetrics

__all__ = ["Metrics"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The metrics in a registry of their own. Counters start at 0 when the process starts."""

    def __init__(self, pipe: AnyPipe) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, processor time, open files, start
        PipeMetrics(registry).add(pipe, "training")
        self.steps = Counter("training_steps", "Steps that this process did", registry=registry)
        self.tokens = Counter("training_tokens", "Bytes of text learned from", registry=registry)
        self.retries = Counter(
            "training_out_of_memory", "Times a step ran out of memory", registry=registry
        )
        self.step = Gauge("training_step", "Steps since the run began", registry=registry)
        self.loss = Gauge("training_loss", "Loss of the last step, nats a byte", registry=registry)
        self.chunks = Gauge("training_chunks", "Micro-batches asked for", registry=registry)
        self.windows = Gauge("training_text_windows", "Windows in a pass", registry=registry)
        self.step_seconds = Histogram(
            "training_step_seconds", "Time of a step", registry=registry, buckets=SECONDS
        )
        self.save_seconds = Histogram(
            "training_save_seconds", "Time to save the state", registry=registry, buckets=SECONDS
        )
        self.saved = Gauge(
            "training_saved_timestamp_seconds", "When a state was last saved", registry=registry
        )
