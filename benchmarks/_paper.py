"""Lists the settings and figures of the torchgpipe paper (arXiv 2004.09910).

They were measured on Tesla P40s with torch 1.3. Balances count layers. ``None`` stands for a figure
that the paper does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABLATION", "AMOEBANET_SPEED", "RESNET_SPEED", "UNET_MEMORY", "UNET_SPEED", "Setting"]


@dataclass(frozen=True)
class Setting:
    """One row of one of the paper's tables.

    Args:
        name: the paper's name for the row.
        n: number of partitions.
        batch: samples in a mini-batch.
        m: number of micro-batches; ``None`` is the plain module, without a pipe.
        balance: layers in each partition; empty if the paper has none.
        throughput: samples per second.
        speed_up: throughput over that of the first row.
        gpipe: the speed-up of GPipe on TPUs, as quoted by the paper.
        checkpoint: checkpoint mode.
        model: the numbers that set the size of the model.
        parameters: number of parameters.
        memory: GiB on all devices together.
        utilisation: share of the time in which the devices compute.
    """

    name: str
    n: int
    batch: int
    m: int | None
    balance: tuple[int, ...] = ()
    throughput: float | None = None
    speed_up: float | None = None
    gpipe: float | None = None
    checkpoint: str = "except_last"
    model: tuple[int, int] = (0, 0)
    parameters: float | None = None
    memory: float | None = None
    utilisation: float | None = None

    @property
    def chunks(self) -> int:
        """The number of micro-batches, 1 for the plain module."""
        return self.m or 1

    @property
    def mode(self) -> str:
        """The checkpoint mode; a plain module recomputes nothing."""
        return self.checkpoint if self.m else "never"


UNET_SPEED = (
    Setting("naive-1", 1, 40, None, (241,), 28.500, 1.0),
    Setting("pipeline-1", 1, 80, 2, (241,), 24.456, 0.858),
    Setting("pipeline-2", 2, 512, 32, (104, 137), 35.502, 1.246),
    Setting("pipeline-4", 4, 512, 16, (30, 66, 84, 61), 67.042, 2.352),
    Setting("pipeline-8", 8, 640, 40, (16, 27, 31, 44, 22, 57, 27, 17), 88.497, 3.105),
)

AMOEBANET_SPEED = (
    Setting("n=2 m=1", 2, 96, 1, (7, 17), 26.733, 1.0, 1.0, "always"),
    Setting("n=2 m=4", 2, 256, 4, (9, 15), 41.133, 1.54, 1.07),
    Setting("n=2 m=32", 2, 1280, 32, (9, 15), 47.386, 1.77, 1.21),
    Setting("n=4 m=1", 4, 160, 1, (3, 4, 5, 12), 26.827, 1.00, 1.13, "always"),
    Setting("n=4 m=4", 4, 360, 4, (3, 6, 7, 8), 44.543, 1.67, 1.26),
    Setting("n=4 m=32", 4, 1152, 32, (3, 6, 7, 8), 72.412, 2.71, 1.84),
    Setting("n=8 m=1", 8, 196, 1, (2, 2, 2, 2, 2, 3, 4, 7), 24.918, 0.93, 1.38, "always"),
    Setting("n=8 m=4", 8, 480, 4, (2, 2, 2, 3, 3, 4, 4, 4), 70.065, 2.62, 1.72),
    Setting("n=8 m=32", 8, 1280, 32, (2, 2, 2, 3, 3, 4, 4, 4), 132.413, 4.95, 3.48),
)

# The paper does not measure ResNet-101. These settings are ours, in the style of the paper's.
RESNET_SPEED = (
    Setting("naive-1", 1, 64, None),
    Setting("pipeline-1", 1, 128, 2),
    Setting("pipeline-2", 2, 512, 16),
    Setting("pipeline-4", 4, 1024, 32),
    Setting("pipeline-8", 8, 2048, 64),
)

UNET_MEMORY = tuple(
    Setting(name, len(balance), 32, m, balance, model=model, parameters=parameters, memory=memory)
    for name, m, balance, model, parameters, memory in (
        ("naive-1", None, (285,), (6, 72), 362.2e6, 20.3),
        ("pipeline-1", 32, (505,), (11, 128), 2.21e9, 20.5),
        ("pipeline-2", 32, (526, 551), (24, 128), 4.99e9, 43.4),
        ("pipeline-4", 32, (472, 54, 36, 515), (24, 160), 7.80e9, 79.1),
        ("pipeline-8", 32, (800, 140, 62, 36, 36, 36, 36, 987), (48, 160), 15.82e9, 154.1),
    )
)

ABLATION = tuple(
    Setting(name, 4, 128, 8, (34, 76, 70, 61), throughput, speed_up, memory=memory, utilisation=u)
    for name, throughput, speed_up, u, memory in (
        ("clock only", 30.662, 1.0, 0.44, 52.2),
        ("+ fork/join", 41.306, 1.347, 0.59, 19.1),
        ("+ copy streams", 55.191, 1.800, 0.71, 30.0),
        ("+ direct skips", 58.477, 1.907, 0.75, 23.5),
    )
)
