"""Warns about layers that take dimension 0 for time: a pipe splits along dimension 0."""

from __future__ import annotations

import warnings

from torch import nn

from pipert.errors import NotBatchFirstWarning

__all__: list[str] = []


def warn_if_not_batch_first(module: nn.Module) -> None:
    """Warn about layers in ``module`` that have torch's default, ``batch_first=False``."""
    found = [_described(name, layer) for name, layer in module.named_children()]
    names = [name for name in found if name]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        some = ", ".join(names[:3]) + more
        warnings.warn(
            f"layers with batch_first=False, which take dimension 0 for time: {some}. A pipe "
            "splits along dimension 0, so each micro-batch would be a part of the sequence. Make "
            "them with batch_first=True, and pass rows in dimension 0. If a layer of your own "
            "transposes their input, all is well: ignore pipert.NotBatchFirstWarning with "
            "warnings.filterwarnings",
            NotBatchFirstWarning,
            stacklevel=4,  # Partitioned, Pipe, and the code that makes one
        )


def _described(name: str, layer: nn.Module) -> str:
    """Describe a layer by its first module that is not batch-first; empty if none is."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
            kind = type(layer)
            is_known = not path or kind.__module__ == nn.TransformerEncoderLayer.__module__
            return f"{name!r} ({kind.__qualname__}{'' if is_known else f', its {path}'})"
    return ""
