"""Train a small GPT for weeks on a growing folder of text, in a process that may be killed.

    python examples/training_service.py --data texts --state state
    curl 127.0.0.1:9464/metrics
    curl 127.0.0.1:9464/healthz
    torchrun --nproc_per_node=2 --max-restarts=3 examples/training_service.py --distributed ...

However it stopped, restart it with the same command: it resumes from the last saved state and ends
bit for bit where it would have ended without the stop. It saves every ten steps (``--save-every``),
so a kill costs ten at most. It exits

* with code 0 after ``--steps``, and after SIGTERM or SIGINT, once it has finished the step and
  saved;
* with code 3 if a forward takes longer than ``--timeout``; it logs what each worker was doing. (Of
  several processes, those that wait for another exit with code 1 instead.)
* with code 2 if an option is wrong, and with code 1 for any other error it cannot handle.

Under torchrun each process has one partition. The first process has the endpoints and the saved
states, which one process or several can resume; the others log only warnings and errors. If one
process is told to stop, all stop after the same step. If one fails, all end, and torchrun restarts
them up to ``--max-restarts`` times.

It logs to stderr, one JSON object per line. ``docs/running_for_weeks.md`` explains what such
a service has to do; each of its parts is a file in ``examples/service``. It needs the extras
``examples`` and ``prometheus``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from ranks import is_first, leave
from service.log_lines import log_event, log_to
from service.loop import Service, Stop
from service.options import read_options

from pipert import PipelineTimeout

STUCK = 3  # the exit code when a worker does not return

_log = logging.getLogger("service")


def main(argv: Sequence[str] | None = None, service: type[Service] = Service) -> int:
    """Runs the service with the options in ``argv``; returns the exit code."""
    # Deterministic cuBLAS needs this; it is read when CUDA is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = read_options(argv)
    log_to(sys.stderr, logging.INFO if is_first() else logging.WARNING)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        service(options, stop).run()
    except PipelineTimeout as error:
        log_event(_log, logging.CRITICAL, "stuck", error=error)
        logging.shutdown()
        os._exit(STUCK)  # Not through the interpreter, which could wait for the stuck worker.
    except Exception as error:
        log_event(_log, logging.CRITICAL, "failed", error=error)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    if code == 0:  # after a failure another process may be stuck, and leaving would wait for it
        leave()
    sys.exit(code)
