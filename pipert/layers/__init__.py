"""Runs the user's layers: random numbers, buffers, tied weights, compilation."""
