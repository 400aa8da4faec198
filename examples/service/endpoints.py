"""Serves ``/metrics`` for Prometheus and ``/healthz`` for the orchestrator over HTTP.

They run on separate threads, so they answer even while a step is stuck. There is no password and
no encryption: bind to an address that only authorised clients can reach.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

__all__ = ["Endpoints"]

_log = logging.getLogger("service.endpoints")


class Endpoints:
    """An HTTP server on its own thread; a context manager.

    Args:
        host: the address to bind to.
        port: 0 for any free port.
        registry: what ``/metrics`` shows.
        problems: returns what ``/healthz`` shows; the status is 200 if that is empty, else 503.
            Called from any thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        problems: Callable[[], list[str]],
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds until a silent client is disconnected

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif path == "/healthz":
                    found = problems()
                    body = {"healthy": not found, "problems": found}
                    code = 503 if found else 200
                    self._answer(code, "application/json", json.dumps(body).encode() + b"\n")
                else:
                    self.send_error(404, explain="there are /metrics and /healthz")

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                _log.debug(format, *args)

        self._server = ThreadingHTTPServer((host, port), Handler)
        self.host, self.port = host, self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="endpoints", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
