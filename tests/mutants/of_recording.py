"""Lists mutants of a recording: its events, their streams, and the waits for them.

Only the recording depends on these, so only recorded times can show them.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

RECORDER = "pipert/observe/recorder.py"
BACKWARD, TOLD = "pipert/observe/backward.py", "pipert/observe/notifier.py"
STAGE, STEP = "pipert/stage/recorded.py", "pipert/stage/backward.py"

_RECORD = "event.record(stream or torch.cuda.current_stream(device))"

MUTANTS = [
    Mutant("not-stamped", RECORDER, "the event's place in a stream", _RECORD, "pass"),
    Mutant(
        "stamped-on-current", RECORDER, "the stream of a moment",
        _RECORD, "event.record(torch.cuda.current_stream(device))",
    ),
    Mutant(
        "stamped-on-current-device", RECORDER, "the device of a moment",
        _RECORD, "event.record(stream or torch.cuda.current_stream())",
    ),
    Mutant(
        "event-without-time", RECORDER, "the time in an event",
        "torch.cuda.Event(enable_timing=True)", "torch.cuda.Event()",
    ),
    Mutant(
        "origin-by-its-own-clock", RECORDER, "the device's time in a date: the process's instead",
        "milliseconds: float = event.elapsed_time(moment)", "milliseconds = 0.0",
    ),
    Mutant(
        "origin-while-busy", RECORDER, "the beginning's wait until devices are idle",
        "torch.cuda.synchronize(device)", "pass",
    ),
    Mutant(
        "origin-not-awaited", RECORDER, "the beginning's wait for its event",
        "event.synchronize()", "pass",
    ),
    Mutant(
        "moment-not-awaited", RECORDER, "the wait for an event before it is dated",
        "moment.synchronize()", "pass",
    ),
    Mutant(
        "begin-on-current", RECORDER, "the stream on which a span begins",
        "stamp(clock, on) if", "stamp(clock) if",
    ),
    Mutant(
        "end-on-current", RECORDER, "the stream on which a span ends",
        "span.end = stamp(span.clock, on)", "span.end = stamp(span.clock)",
    ),
    Mutant(
        "during-ends-on-current", RECORDER, "the stream on which a span around a block ends",
        "raise\n        self.end(span, on)", "raise\n        self.end(span)",
    ),
    Mutant(
        "during-begins-on-current", RECORDER, "the stream on which a span around a block begins",
        "span = self.begin(kind, i, j, device, clock, on)\n        try",
        "span = self.begin(kind, i, j, device, clock)\n        try",
    ),
    Mutant(
        "node-ends-on-current", BACKWARD, "the stream on which a node's span ends",
        "span.end = stamp(span.clock, on)", "span.end = stamp(span.clock)",
    ),
    Mutant(
        "copy-stamped-on-current", STAGE, "the stream on which a copy is stamped",
        "with self._recorder.during(COPY, i, j, device, clock, on) as span",
        "with self._recorder.during(COPY, i, j, device, clock) as span",
    ),
    Mutant(
        "gradient-begins-on-current", STAGE, "the stream on which a gradient's copy begins",
        "self._recorder.begin(COPY, i, to, home, clock_back, on_back)",
        "self._recorder.begin(COPY, i, to, home, clock_back, None)",
    ),
    Mutant(
        "gradient-ends-on-current", STAGE, "the stream on which a gradient's copy ends",
        "watch_node(moved, begin_gradient, on_back)", "watch_node(moved, begin_gradient, None)",
    ),
    Mutant(
        "copy-stamped-at-target", STAGE, "the source device, whose clock times a copy",
        "for device, on in (source, target):", "for device, on in (target, source):",
    ),
    Mutant(
        "wait-back-by-the-process", STAGE, "the device's clock for a wait for a gradient",
        "begin = partial(self._recorder.begin, WAIT, i, self._place.j, self._place.device)",
        "begin = partial(self._recorder.begin, WAIT, i, self._place.j, self._place.device, _CPU)",
    ),
    Mutant(
        "wait-back-not-recorded", STAGE, "the record of a wait for a gradient",
        "watch_node(xs, begin, None)", "pass",
    ),
    Mutant(
        "wait-by-the-process", STAGE, "the device's clock for a wait",
        "with self._recorder.during(WAIT, i, self._place.j, self._place.device):\n"
        "                return self._transport.wait",
        "with self._recorder.during(WAIT, i, self._place.j, self._place.device, _CPU):\n"
        "                return self._transport.wait",
    ),
    Mutant(
        "compute-unknown", STAGE, "the compute stream that identifies a wait",
        "compute = streams.compute_stream(self._place.device)", "compute = None",
    ),
    Mutant(
        "forward-by-the-process", "pipert/stage/actions.py", "the device's clock for a forward",
        "with notifier.recorded(Action(FORWARD, i, j), device):",
        'with notifier.recorded(Action(FORWARD, i, j), __import__("torch").device("cpu")):',
    ),
    Mutant(
        "step-backward-by-the-process", STEP, "the device's clock for a backward of a step",
        "with notifier.recorded(Action(BACKWARD, i, stage.place.j), stage.place.device)",
        'with notifier.recorded(Action(BACKWARD, i, stage.place.j), torch.device("cpu"))',
    ),
    Mutant(
        "recomputation-by-the-process", TOLD, "the device's clock for a recomputation",
        "stack.enter_context(self.recorded(action, device))",
        'stack.enter_context(self.recorded(action, torch.device("cpu")))',
    ),
    Mutant(
        "tasks-by-the-process", TOLD, "the device's clock for tasks",
        "with self.recorder.during(kind_of(action), action.i, action.j, device) as span",
        'with self.recorder.during(kind_of(action), action.i, action.j, device, torch.device("cpu")'
        ") as span",
    ),
    Mutant(
        "backward-by-the-process", BACKWARD, "the device's clock for a backward",
        "self._span = self._recorder.begin(BACKWARD, i, j, device)\n            _thread",
        'self._span = self._recorder.begin(BACKWARD, i, j, device, torch.device("cpu"))\n'
        "            _thread",
    ),
    Mutant(
        "backward-ends-by-the-process", BACKWARD, "the device's clock for the end of a backward",
        "now = stamp(self._span.clock)", 'now = stamp(torch.device("cpu"))',
    ),
    Mutant(
        "interrupted-by-the-process", BACKWARD, "the device's clock for pieces of a backward",
        "_thread.switch_to(None, stamp(device))",
        '_thread.switch_to(None, stamp(torch.device("cpu")))',
    ),
    Mutant(
        "piece-by-the-process", BACKWARD, "the device's clock for a later piece of a backward",
        "self._span = self._recorder.begin(BACKWARD, i, j, device)\n            self._span.start",
        'self._span = self._recorder.begin(BACKWARD, i, j, device, torch.device("cpu"))\n'
        "            self._span.start",
    ),
    Mutant(
        "origin-of-another-device", RECORDER, "the device whose beginning is stamped",
        "event = stamp(device)", 'event = stamp(torch.device("cuda", 0))',
    ),
    Mutant(
        "recorded-wait-lost", STAGE, "the wait itself, if it is recorded",
        "return self._transport.wait(i, x, waiter, awaited)\n        y", "return x\n        y",
    ),
    Mutant(
        "recorded-copy-swapped", STAGE, "source and target of a recorded copy: swapped",
        "moved = self._transport.copy(i, tensors, source, target, origin)",
        "moved = self._transport.copy(i, tensors, target, source, origin)",
    ),
    Mutant(
        "gradient-begins-by-the-process", STAGE,
        "the device's clock for the begin of a gradient's copy",
        "self._recorder.begin(COPY, i, to, home, clock_back, on_back)",
        "self._recorder.begin(COPY, i, to, home, _CPU)",
    ),
    Mutant(
        "unrecorded-wait-lost", STAGE, "the wait itself, if its backward is recorded",
        "y = self._transport.wait(i, x, waiter, awaited)", "y = x",
    ),
]  # fmt: skip
