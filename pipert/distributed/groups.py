"""Groups of some of the ranks, which the others need not hear of.

torch (2.13) gives such a group a name that contains how many groups a rank has. Ranks that have not
as many, since some share weights or because of groups of the caller's, would wait for each other
under different names. So they say how many they have first, and those with fewer have groups of
their own while the name is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__: list[str] = []


def make_group(ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    """Make a group, with the time limit of the default one; called by all of its ranks."""
    c10d: Any = dist.distributed_c10d
    store, me = c10d._get_default_store(), dist.get_rank()
    counts = _made.setdefault(c10d._get_default_group(), Counter())
    of = ",".join(map(str, ranks))
    key = f"pipert/groups/{of}/{counts[of]}"
    own = len(c10d._world.pg_names)
    store.set(f"{key}/{me}", str(own))
    most = max([int(store.get(f"{key}/{rank}")) for rank in ranks])
    alone = []
    try:
        for _ in range(most - own):
            alone.append(dist.new_group([me], backend="gloo", use_local_synchronization=True))
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), store.timeout, backend, use_local_synchronization=True
        )
    finally:
        for one in alone:
            dist.destroy_process_group(one)
    counts[of] += 1
    return group


_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How many groups of which ranks, in each default group: in all of their ranks alike."""
