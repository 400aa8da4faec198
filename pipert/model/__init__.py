"""Splits a model into partitions and places them on devices."""
