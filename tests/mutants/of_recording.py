"""Mutants of a recording: its events, the streams that they are put into, and who waits for them.

Nothing but what is recorded depends on these, so nothing but times can tell.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

STAMP, RECORDER = "pipert/recording/stamp.py", "pipert/recording/recorder.py"
BACKWARD, LANE = "pipert/recording/backward.py", "pipert/recorded_lane.py"

TESTS = ("tests/cuda/test_recording_on_cuda.py", "tests/recording", "tests/step/test_step_streams.py")

_RECORD = "event.record(stream or torch.cuda.current_stream(device))"


def _mutant(name: str, file: str, what: str, text: str, instead: str) -> Mutant:
    return Mutant(name, file, what, text, instead, TESTS)


MUTANTS = [
    _mutant("not-stamped", STAMP, "the event's place in a stream", _RECORD, "pass"),
    _mutant(
        "stamped-on-current", STAMP, "the stream that a moment is of",
        _RECORD, "event.record(torch.cuda.current_stream(device))",
    ),
    _mutant(
        "stamped-on-current-device", STAMP, "the device that a moment is of",
        _RECORD, "event.record(stream or torch.cuda.current_stream())",
    ),
    _mutant(
        "event-without-time", STAMP, "the time in an event",
        "torch.cuda.Event(enable_timing=True)", "torch.cuda.Event()",
    ),
    _mutant(
        "origin-while-busy", STAMP, "the beginning waits until devices are idle",
        "torch.cuda.synchronize(device)", "pass",
    ),
    _mutant(
        "origin-not-awaited", STAMP, "the beginning waits for its event",
        "event.synchronize()", "pass",
    ),
    _mutant(
        "moment-not-awaited", STAMP, "dating waits for the event",
        "moment.synchronize()", "pass",
    ),
    _mutant(
        "begin-on-current", RECORDER, "the stream that a span begins on",
        "stamp(clock, on))", "stamp(clock))",
    ),
    _mutant(
        "end-on-current", RECORDER, "the stream that a span ends on",
        "span.end = stamp(span.clock, on)", "span.end = stamp(span.clock)",
    ),
    _mutant(
        "during-ends-on-current", RECORDER, "the stream that a span around a block ends on",
        "raise\n        self.end(span, on)", "raise\n        self.end(span)",
    ),
    _mutant(
        "during-begins-on-current", RECORDER, "the stream that a span around a block begins on",
        "span = self.begin(kind, i, j, device, clock, on)\n        try",
        "span = self.begin(kind, i, j, device, clock)\n        try",
    ),
    _mutant(
        "node-ends-on-current", BACKWARD, "the stream that a node's span ends on",
        "span.end = stamp(span.clock, on)", "span.end = stamp(span.clock)",
    ),
    _mutant(
        "copy-stamped-on-current", LANE, "the stream that a copy is stamped on",
        "with self._recorder.during(COPY, i, self.j, self._device, clock, on) as span",
        "with self._recorder.during(COPY, i, self.j, self._device, clock) as span",
    ),
    _mutant(
        "gradient-begins-on-current", LANE, "the stream that a gradient's copy begins on",
        "Way(i, self.j, to, self._device, home, size, clock, on)",
        "Way(i, self.j, to, self._device, home, size, clock, None)",
    ),
    _mutant(
        "gradient-ends-on-current", LANE, "the stream that a gradient's copy ends on",
        "watch_node(moved, partial(gradients.begin, self._recorder), on)",
        "watch_node(moved, partial(gradients.begin, self._recorder), None)",
    ),
    _mutant(
        "copy-stamped-at-target", LANE, "the device that is read, whose clock a copy has",
        "for device, on in (source, target):", "for device, on in (target, source):",
    ),
    _mutant(
        "wait-stamped-on-current", LANE, "the stream that waits, of a recorded wait",
        "with self._recorder.during(WAIT, i, self.j, self._device, on=compute):",
        "with self._recorder.during(WAIT, i, self.j, self._device):",
    ),
    _mutant(
        "wait-back-begins-on-current", LANE, "the stream that waits, where a gradient's begins",
        "begin = partial(self._recorder.begin, WAIT, i, self.j, self._device, on=compute)",
        "begin = partial(self._recorder.begin, WAIT, i, self.j, self._device)",
    ),
    _mutant(
        "wait-back-ends-on-current", LANE, "the stream that waits, where a gradient's ends",
        "watch_node(differentiable(y)[0], begin, compute)",
        "watch_node(differentiable(y)[0], begin, None)",
    ),
    _mutant(
        "recorded-wait-lost", LANE, "the wait itself, where it is recorded",
        "return super()._wait(i, x, waiter, awaited)\n        y", "return x\n        y",
    ),
    _mutant(
        "unrecorded-wait-lost", LANE, "the wait itself, where its backward is recorded",
        "y = super()._wait(i, x, waiter, awaited)", "y = x",
    ),
]  # fmt: skip
