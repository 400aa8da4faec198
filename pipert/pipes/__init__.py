"""Pipes: what ``Pipe`` and ``ModulePipe`` share, and the script runner that traces them."""
