"""``Partition``: consecutive layers, which a pipe calls one by one."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

__all__: list[str] = []


class Partition(nn.Sequential):
    """An ``nn.Sequential`` of the module's own layers. It takes no hooks: a pipe never calls it."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "a hook of a partition would never be called: a pipe calls its layers, for each "
            "micro-batch. Register it on the layers, such as pipe.partitions[j][0] for the input "
            "and pipe.partitions[j][-1] for the output, or on the pipe for whole calls"
        )

    register_forward_pre_hook = register_forward_hook = _refuse
    register_full_backward_pre_hook = register_full_backward_hook = _refuse
    register_backward_hook = _refuse
