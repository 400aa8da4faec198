"""What if one wait were missing? Each is taken out, and the tests must find out.

A wait that is missing rarely shows: numbers are right as long as the stream that nobody waits for
is fast. ``python -m tests.mutants`` takes out the waits of the package one at a time, as well as
each ``record_stream``, each event, each device and stream that is made the current one, and each
choice of a stream for a copy. It runs the tests on simulated GPUs against what is left, and prints
who has noticed. README.md in this folder has its table.

``python -m tests.mutants --breakages`` breaks what has nothing to do with GPUs, and runs the tests
without any.

``mutant`` says what a mutant is, the ``of_...`` files list them, ``sites`` finds the places in the
package that one must exist for, ``suite`` says which tests are run, ``trial`` runs them.
"""
