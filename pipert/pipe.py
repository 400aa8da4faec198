"""``Pipe``: an ``nn.Sequential`` that runs pipeline-parallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from pipert._typing import Device
from pipert.model.partitioned import Partitioned
from pipert.model.settings import check_checkpoints
from pipert.model.split import require_balance
from pipert.pipes.pipelined import Pipelined
from pipert.skip.routes import routes
from pipert.stage.assembly import Layered

__all__ = ["Pipe"]


class Pipe(Pipelined, Partitioned):
    """Runs an ``nn.Sequential`` over several devices, one worker thread for each.

    A call splits its arguments into micro-batches, passes them through the partitions in the order
    of the deterministic clock-cycle (section 3.2 of the paper), and joins the outputs. The result
    is the plain module's, gradients included; use the pipe in any training loop.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> with Pipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4) as pipe:
    ...     pipe(torch.randn(32, 8)).shape
    torch.Size([32, 1])

    Args:
        module: the layers. They move to their devices, and stay the same objects under the
            same names: ``state_dict()`` keys, parameter names and identities are the module's.
        balance: the number of layers in each partition, in order.
        devices: the device of each partition; there may be more than partitions. A CUDA device may
            appear more than once, and is served by one thread. Each ``'cpu'`` is a logical device
            with a thread of its own; ``'cpu:0'`` and the like may appear more than once, too.
            Default: the CUDA devices in order; without CUDA, a logical device for each partition.
        chunks: the largest number of micro-batches that a call is split into; default 1.
        checkpoint: which micro-batches are recomputed in the backward instead of keeping their
            activations: ``'always'``, ``'except_last'`` (default) or ``'never'``; or a list with
            the mode of each partition.
        deferred_batch_norm: whether BatchNorm layers in training mode update their running
            statistics once for each call, from all its rows, rather than once for each micro-batch.
            Default: they do not, and there is a warning if the module has such layers.
        timeout: how many seconds a call may take before it raises :class:`PipelineTimeout`.
            Default: no limit.

    Raises:
        ValueError: ``balance`` is missing, does not add up, or has an entry below one; ``chunks``
            is below one; ``checkpoint`` is unknown; a device does not exist; a buffer would be
            needed on two devices.
        TypeError: ``module`` is not a plain ``nn.Sequential``, its stashes and pops do not match,
            or ``devices`` names no devices.
        IndexError: there are more partitions than devices.
    """

    _own = Pipelined._own | Partitioned._own

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str | Sequence[str] | None = None,
        deferred_batch_norm: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        balance = [*require_balance(balance)]
        self.chunks = chunks
        self._checkpoint = check_checkpoints(checkpoint, len(balance))
        self.timeout = timeout
        super().__init__(module, balance, devices, deferred_batch_norm)
        self._start()

    def _model(self) -> Layered:
        return Layered(self._partitions, routes(self._partitions))

    def _entry_module(self) -> nn.Module | None:
        return next(iter(self), None)
