"""Tells counters, observers, recordings and profilers what a pipe does."""
