"""Writes machine-readable log lines, each of them one JSON object.

Every record of every logger becomes such a line, including pipert's records, warnings and uncaught
exceptions, so a reader needs to know only one format. Every line has ``time``, ``level``,
``logger`` and ``event``; the other fields depend on the event.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

__all__ = ["JsonLines", "log_event", "log_to"]


class JsonLines(logging.Formatter):
    """A formatter that makes one line of a record: fields or message, plus any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields: dict[str, Any] | None = record.__dict__.get("fields")
        if fields is None:
            line |= {"event": "message", "message": record.getMessage()}
        else:
            line |= {"event": record.getMessage()}
            line |= {name: _plain(value) for name, value in fields.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    *,
    error: BaseException | None = None,
    **fields: Any,
) -> None:
    """Logs ``event`` with its fields and the error's traceback, if any."""
    # The event is passed as an argument because it is not a format string.
    logger.log(level, "%s", event, extra={"fields": fields}, exc_info=error)


def log_to(stream: TextIO, level: int = logging.INFO) -> None:
    """Sends all logging to ``stream``, including warnings and uncaught exceptions."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    log_event(logging.getLogger("service"), logging.CRITICAL, "crashed", error=error)


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    log_event(
        logging.getLogger("service"),
        logging.ERROR,
        "thread crashed",
        error=args.exc_value,
        thread=args.thread.name if args.thread else "",
    )


def _plain(value: Any) -> Any:
    # JSON cannot represent these numbers.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
