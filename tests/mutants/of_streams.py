"""Lists mutants of the streams, of the copies on them and of the waits in the graph."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

STREAM, TRANSFER = "pipert/autograd/streams.py", "pipert/autograd/transfer.py"
EFFECTS = "pipert/layers/effects.py"

_OWN = "stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]"
_BACK = "ctx.back = (home, target, source, streams.compute_stream(home))"
_STREAMS = "with torch.cuda.stream(source), torch.cuda.stream(target):"

MUTANTS = [
    Mutant(
        "no-copy-streams", STREAM, "the separate streams for copies",
        _OWN, "stream = torch.cuda.current_stream(device)",
    ),
    Mutant(
        "copy-stream-elsewhere", STREAM, "the device on which a copy stream is made",
        _OWN, "stream = torch.cuda.Stream()",
    ),
    Mutant(
        "one-copy-stream", STREAM, "the separate copy stream of each micro-batch",
        "self._streams.get((device, i))", "self._streams.get((device, 0))",
    ),
    Mutant(
        "compute-is-default", STREAM,
        "the caller's stream for computation: the default one instead",
        "return torch.cuda.current_stream(device) if",
        "return torch.cuda.default_stream(device) if",
    ),
    Mutant(
        "own-streams-overlooked", STREAM, "the caller's streams on devices outside of the pipe",
        "if compute_stream(device) != default(device)",
        "if default(device) != default(device)",
    ),
    Mutant(
        "copies-follow-nobody", STREAM, "the wait of a run's copies for the caller's streams",
        "copying.wait_event(events[device])", "pass",
    ),
    Mutant(
        "new-copy-stream-follows-nobody", STREAM,
        "the wait of a new copy stream for the caller's stream",
        "stream.wait_event(begun or torch.cuda.current_stream(device).record_event())", "pass",
    ),
    Mutant(
        "copies-follow-default-streams", STREAM,
        "the caller's streams that a run's copies wait for: default ones instead",
        "torch.cuda.current_stream(device).record_event() for",
        "torch.cuda.default_stream(device).record_event() for",
    ),
    Mutant(
        "no-wait", STREAM, "every wait of a stream for another",
        "waiter.wait_stream(awaited)", "pass",
    ),
    Mutant(
        "wait-reversed", STREAM, "the direction of a wait",
        "waiter.wait_stream(awaited)", "awaited.wait_stream(waiter)",
    ),
    Mutant(
        "copies-never-block", STREAM, "the blocking of copies from and to the CPU",
        "tensor.to(device)", "tensor.to(device, non_blocking=True)",
    ),
    Mutant(
        "copy-not-on-source", STREAM, "the source's copy stream: a copy reads on the current one",
        _STREAMS, "with torch.cuda.stream(target):",
    ),
    Mutant(
        "copy-not-on-target", STREAM, "the target's copy stream: a copy writes on the current one",
        _STREAMS, "with torch.cuda.stream(source):",
    ),
    Mutant(
        "source-not-recorded", STREAM, "record_stream of a copied tensor",
        "_stored(tensor).record_stream(source)", "pass",
    ),
    Mutant(
        "result-not-recorded", STREAM, "record_stream of the copy",
        "result.record_stream(reader)", "pass",
    ),
    Mutant(
        "gradient-not-recorded", STREAM, "record_stream of a gradient of a step",
        "_stored(tensor).record_stream(torch.cuda.current_stream(tensor.device))", "pass",
    ),
    Mutant(
        "reader-is-current", STREAM, "the stream of the forward as the reader of a gradient",
        "reader = reader or compute_stream(device)", "reader = compute_stream(device)",
    ),
    Mutant(
        "reader-is-target", STREAM, "the compute stream as the reader of a copy",
        "reader = reader or compute_stream(device)", "reader = reader or target",
    ),
    Mutant(
        "shared-gradient-copied", TRANSFER, "the separate memory for a gradient that others add to",
        "given = tuple(map(Tensor.clone, given))", "pass",
    ),
    Mutant(
        "own-gradient-not-awaited", TRANSFER, "the wait for that memory before it is copied",
        "streams.wait(reader, streams.compute_stream(given[0].device))", "pass",
    ),
    Mutant(
        "graph-copy-swapped", TRANSFER, "source and target of a copy in the graph: swapped",
        "return streams.copy(xs, device, source, target)",
        "return streams.copy(xs, device, target, source)",
    ),
    Mutant(
        "gradient-copy-swapped", TRANSFER, "source and target of the copy back: swapped",
        _BACK, "ctx.back = (home, source, target, streams.compute_stream(home))",
    ),
    Mutant(
        "gradient-read-on-compute", TRANSFER, "the copy stream on which a gradient is read",
        _BACK,
        "ctx.back = (home, streams.compute_stream(device), source, streams.compute_stream(home))",
    ),
    Mutant(
        "gradient-written-on-compute", TRANSFER, "the copy stream on which a gradient is written",
        _BACK,
        "ctx.back = (home, target, streams.compute_stream(home), streams.compute_stream(home))",
    ),
    Mutant(
        "handed-out-from-copy-stream", TRANSFER, "memory of the compute stream for .grad",
        "ctx.back = (home, target, ctx.back[3], ctx.back[3])", "pass",
    ),
    Mutant(
        "gradient-without-reader", TRANSFER, "the reader of a gradient",
        _BACK, "ctx.back = (home, target, source)",
    ),
    Mutant(
        "no-wait-in-graph", TRANSFER, "the forward's wait in the graph",
        "streams.wait(waiter, awaited)\n        return", "return",
    ),
    Mutant(
        "gradients-not-copied-back", TRANSFER,
        "the streams of the copy back: the current ones instead",
        "moved = streams.copy(given, *ctx.back)",
        "home = ctx.back[0]\n"
        "        on = [streams.compute_stream(k) for k in (given[0].device, home)]\n"
        "        moved = streams.copy(given, home, *on)",
    ),
    Mutant(
        "anomaly-overlooked", TRANSFER, "the waits before anomaly detection reads gradients",
        "_let_autograd_read(moved, ctx.back[2])", "pass",
    ),
    Mutant(
        "anomaly-not-awaited", TRANSFER, "the wait before anomaly detection reads a gradient",
        "streams.wait(streams.compute_stream(tensor.device), target)", "pass",
    ),
    Mutant(
        "anomaly-reversed", TRANSFER, "the direction of that wait",
        "streams.wait(streams.compute_stream(tensor.device), target)",
        "streams.wait(target, streams.compute_stream(tensor.device))",
    ),
    Mutant(
        "no-wait-in-backward", TRANSFER, "the wait in the backward",
        "streams.wait(*ctx.back)", "pass",
    ),
    Mutant(
        "backward-waits-forwards", TRANSFER, "the direction of the wait in the backward",
        "ctx.back = (awaited, waiter)", "ctx.back = (waiter, awaited)",
    ),
    Mutant(
        "samples-not-awaited", EFFECTS, "the wait of a comparison for the last recomputation",
        "stream.wait_event(event)", "pass",
    ),
    Mutant(
        "samples-on-compute", EFFECTS, "the separate stream on which recomputations are compared",
        "stack.enter_context(torch.cuda.stream(stream))", "pass",
    ),
    Mutant(
        "samples-freed-early", EFFECTS, "the wait for a comparison that ends in an error",
        "stack.callback(torch.cuda.current_stream(device).wait_stream, stream)", "pass",
    ),
    Mutant(
        "recomputed-on-default", EFFECTS, "the stream of a recomputation: the default one instead",
        "torch.cuda.current_stream(device).record_event()",
        "torch.cuda.default_stream(device).record_event()",
    ),
]  # fmt: skip
