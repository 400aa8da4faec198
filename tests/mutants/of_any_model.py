"""Lists mutants of the copies and waits of a model that runs its own ``forward``."""

from __future__ import annotations

from tests.mutants.mutant import Row

__all__ = ["MUTANTS"]

COPIES, AROUND = "pipert/any_model/tensor_copies.py", "pipert/any_model/around_layers.py"

MUTANTS: list[Row] = [
    ("thread-on-first-device", AROUND, "the partition's device as its thread's current one",
     "torch.cuda.set_device(stage.place.device)", "pass"),
    ("moved-not-after-end", COPIES,
     "the copy stream's wait, at a partition's end, for its computation",
     "self._stage.boundary.copies.let_others_copy(self._i)", "pass"),
    ("made-elsewhere-not-waited-for", COPIES,
     "a copy's wait for a tensor that the same partition made on another device",
     "streams.wait(source, streams.compute_stream(tensor.device))", "pass"),
    ("made-elsewhere-by-another", COPIES, "the copy stream of the micro-batch",
     "source = self._run.streams.get(tensor.device, self._i)",
     "source = self._run.streams.get(tensor.device, self._i + 1)"),
    ("gradient-not-after-copy", COPIES, "a partition's wait for the gradient of a moved tensor",
     "(tensor,) = transfer.wait_back((tensor,), copying, compute)", "pass"),
    ("gradient-of-another", COPIES, "the copy stream that brings a gradient back",
     "copying = self._run.streams.get(tensor.device, self._i)",
     "copying = self._run.streams.get(tensor.device, self._i + 1)"),
    ("gradient-waits-on-default", COPIES, "the stream that waits for a gradient",
     "compute = streams.compute_stream(tensor.device)",
     "compute = torch.cuda.default_stream(tensor.device)"),
]  # fmt: skip
