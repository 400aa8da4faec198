"""Removes each wait in turn, and checks that the tests notice.

A missing wait rarely shows: numbers are right as long as the stream to wait for is fast.
``python -m tests.mutants`` removes the waits of the package one at a time, and likewise each
``record_stream``, each event, each setting of a current device or stream, and each choice of a
stream for a copy. It runs the tests on simulated GPUs against the changed package, and prints which
test noticed. README.md in this folder has its table.

``python -m tests.mutants --breakages`` breaks guarantees that have nothing to do with GPUs, and
runs the tests without simulated GPUs.

``mutant`` defines a mutant, the ``of_...`` files list them, ``sites`` finds the places in the
package that need one, ``suite`` selects the tests, and ``trial`` runs them.
"""
