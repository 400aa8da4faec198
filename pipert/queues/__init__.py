"""Primitives that pipert's threads wait on. Nothing here knows torch or pipelines."""
