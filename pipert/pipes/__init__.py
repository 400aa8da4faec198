"""Pipes: the settings, and what ``Pipe`` and ``ModulePipe`` share."""
