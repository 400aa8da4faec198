"""Removes each wait in turn, and checks that the tests notice.

A missing wait rarely shows: numbers are right as long as the stream to wait for is fast.
``python -m tests.mutants`` removes the waits of the package one at a time, and likewise each
``record_stream``, each event, each setting of a current device or stream, and each choice of a
stream for a copy. It runs the tests on simulated GPUs against the changed package, and prints which
test noticed.

``mutant`` defines a mutant, the ``of_...`` files list them, ``sites`` finds the places in the
package that need one, ``suite`` selects the tests, and ``trial`` runs them.
"""

from __future__ import annotations

from tests.mutants import of_any_model, of_stages, of_streams, of_workers
from tests.mutants.mutant import Mutant, Row

__all__ = ["MUTANTS"]

ROWS: list[Row] = [
    *of_streams.MUTANTS, *of_any_model.MUTANTS, *of_stages.MUTANTS, *of_workers.MUTANTS
]  # fmt: skip
MUTANTS = [Mutant(*row) for row in ROWS]
"""Mutants of the uses of streams, events and devices, which simulated GPUs show."""
