"""Warns of torch's layers that compute something else from micro-batches than from the whole batch.

``tests/layers/test_whole_batch.py`` has tried all layers of ``torch.nn``. BatchNorm has a warning
of its own (``layers/batchnorm.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from pipert._torch import BatchNorm, NormBase, forward_pre_hooks
from pipert.errors import WholeBatchWarning


def warn_of_whole_batches(layers: Iterable[tuple[str, nn.Module]], stacklevel: int) -> None:
    """Warn of those of the named layers whose gradients or state are not the plain module's."""
    found = [f"{name!r} ({why})" for name, layer in layers if (why := _why(layer))]
    if found:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        warnings.warn(
            f"the module has layers that depend on the whole mini-batch: {shown}. In a pipe each "
            "does this for each micro-batch, so gradients, or what the layer keeps, are not those "
            "without a pipe. With chunks=1 they are; otherwise accept that, as data parallelism "
            "does, by ignoring pipert.WholeBatchWarning with warnings.filterwarnings",
            WholeBatchWarning,
            stacklevel=stacklevel,
        )


def _why(layer: nn.Module) -> str:
    is_embedding = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    if is_embedding and layer.scale_grad_by_freq and layer.weight.requires_grad:
        return "scale_grad_by_freq divides by the counts of its indices"
    if isinstance(layer, NormBase) and not isinstance(layer, BatchNorm):
        is_updated = layer.training and layer.track_running_stats
        return "track_running_stats updates its statistics" if is_updated else ""
    # The parametrization is a module, the older kind of spectral norm a hook.
    for part in (layer, *forward_pre_hooks(layer).values()) if layer.training else ():
        if hasattr(part, "n_power_iterations"):
            return "spectral norm iterates in each forward"
    return ""
