"""Lists mutants of the measurements in ``python -m pipert check``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

LOAD, WAYS = "pipert/check/load.py", "pipert/check/ways.py"

_RECORD = "torch.cuda.current_stream(device).record_event("

MUTANTS = [
    Mutant(
        "check-without-times", LOAD, "the time between two events",
        "start.elapsed_time(end)", "0.0",
    ),
    Mutant(
        "check-event-without-time", LOAD, "the time in an event",
        "torch.cuda.Event(enable_timing=True)", "torch.cuda.Event()",
    ),
    Mutant(
        "check-not-stamped", LOAD, "the event's place in a stream", _RECORD, "(",
    ),
    Mutant(
        "check-stamps-current-device", LOAD, "the device of an event",
        _RECORD, "torch.cuda.current_stream().record_event(",
    ),
    Mutant(
        "check-while-busy", WAYS, "waiting until devices are idle before times begin and end",
        "torch.cuda.synchronize(device)", "pass",
    ),
]  # fmt: skip
