"""Runs tasks on threads, under the caller's context, and ends the threads. Knows no pipelines."""
