"""Skip connections: a layer stashes a value, a later layer pops it (section 3.3 of the paper).

>>> @skippable(stash=["skip"])
... class Stash(nn.Module):
...     def forward(self, x):
...         yield stash("skip", x)
...         return x

>>> @skippable(pop=["skip"])
... class PopAdd(nn.Module):
...     def forward(self, x):
...         skip = yield pop("skip")
...         return x + skip

>>> unit = nn.Sequential(Stash(), nn.Linear(8, 8), PopAdd())

The layers behave the same in a plain ``nn.Sequential`` and in a :class:`~pipert.Pipe`. In a pipe
the value goes from the partition that stashes it straight to the one that pops it, in one copy, and
its gradient goes straight back.
"""

from __future__ import annotations

from pipert.skip.declarations import verify_skippables
from pipert.skip.skippable import Skippable, pop, skippable, stash
from pipert.skip.store import Namespace

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
