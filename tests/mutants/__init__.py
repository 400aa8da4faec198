"""Removes each wait in turn, and checks that the tests notice.

A missing wait rarely shows: numbers are right as long as the stream to wait for is fast. ``places``
finds each use of a stream, an event or a current device in the syntax of the package, and says what
to put in its place; ``python -m tests.mutants`` runs tests on simulated GPUs with one at a time.
"""
