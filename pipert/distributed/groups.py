"""Makes process groups of some of the ranks without the others taking part.

torch (2.13) puts the number of groups that a rank has into the name of such a group. Ranks with
different numbers, because some share weights or because the caller has groups of his own, would
wait for each other under different names. So the ranks first exchange their numbers, and those with
fewer have temporary groups of their own while the name is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__: list[str] = []


def make_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group with the default group's time limit; called by all of its ranks."""
    c10d: Any = dist.distributed_c10d
    store, me = c10d._get_default_store(), dist.get_rank()
    counts = _made.setdefault(c10d._get_default_group(), Counter())
    listed = ",".join(map(str, ranks))
    key = f"pipert/groups/{listed}/{counts[listed]}"
    group_count = len(c10d._world.pg_names)
    store.set(f"{key}/{me}", str(group_count))
    most = max([int(store.get(f"{key}/{rank}")) for rank in ranks])
    temporary = []
    try:
        for _ in range(most - group_count):
            temporary.append(dist.new_group([me], backend="gloo", use_local_synchronization=True))
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), store.timeout, backend, use_local_synchronization=True
        )
    finally:
        for one in temporary:
            dist.destroy_process_group(one)
    counts[listed] += 1
    return group


_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How many groups of each set of ranks were made under each default group; all of these ranks count
alike."""
