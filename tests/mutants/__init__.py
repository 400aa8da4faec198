"""Removes each wait in turn; the tests must notice.

A missing wait rarely shows: numbers are right as long as the stream to wait for
is fast. ``python -m tests.mutants`` removes the waits of the package one at a time, and likewise
each ``record_stream``, each event, each setting of a current device or stream, and each
choice of a stream for a copy. It runs the tests on simulated GPUs against the rest, and prints
which test noticed. README.md in this folder has its table.

``python -m tests.mutants --breakages`` breaks what has nothing to do with GPUs, and runs the tests
without any.

``mutant`` says what a mutant is, the ``of_...`` files list them, ``sites`` finds the places in the
package that one must exist for, ``suite`` says which tests are run, ``trial`` runs them.
"""
