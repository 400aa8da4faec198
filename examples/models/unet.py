"""U-Net (B, C), an image-to-image network of any depth and width, as a flat Sequential.

Ronneberger, O.; Fischer, P.; Brox, T.: U-Net: convolutional networks for biomedical image
segmentation. MICCAI 2015. https://arxiv.org/abs/1505.04597. The parameters B and C, and the blocks
of convolution, dropout, instance norm and leaky ReLU, are from the torchgpipe paper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from models.skips import Concatenate, Stash
from torch import nn

from pipert.skip import Namespace

__all__ = ["unet"]

LEVELS = 5  # each halves the image on the way down and doubles it on the way up

Named = tuple[str, nn.Module]


def unet(
    blocks: int = 5,
    channels: int = 64,
    *,
    in_channels: int = 3,
    out_channels: int = 1,
    dropout: float = 0.1,
) -> nn.Sequential:
    """U-Net (B, C): ``[batch, in_channels, height, width]`` to ``[batch, out_channels, ...]``.

    ::

        in_channels                                                     out_channels
             |                                                                ^
             v                                                              1 x 1
        encoder0   C   ------------------ skip --------------------->   C/2  decoder0
             v pool                                                  upsample ^
          encoder1   2C   --------------- skip ---------------->    C  decoder1
               v pool                                           upsample ^
            encoder2   4C   ------------ skip ------------->  2C  decoder2
                 v pool                                    upsample ^
              encoder3   8C   --------- skip --------->  4C  decoder3
                   v pool                             upsample ^
                encoder4  16C   ------ skip ----->  8C  decoder4
                     v pool                      upsample ^
                      `---->   bottleneck  16C   ---------'

    Each box is a *cell* of ``blocks`` blocks, shown with its output channels; inside, the
    bottleneck has 32C. A block is a 3 x 3 convolution, dropout, instance norm and leaky ReLU. Each
    of these is a layer of the Sequential. So are 5 poolings, 5 upsamplings, both ends of 5 skips,
    and the 1 x 1 convolution at the end: there are ``44 * blocks + 21`` layers in all.

    Args:
        blocks: B, the number of blocks in a cell.
        channels: C, an even number.
        in_channels, out_channels: the channels of the input and output images.
        dropout: probability that a block drops a channel of its convolution.

    Height and width should be at least 64: the bottleneck sees a 32nd of them, and instance norm
    needs more than one pixel.

    Raises:
        ValueError: ``blocks`` or ``channels`` is too small, or ``channels`` is odd.
    """
    if blocks < 1:
        raise ValueError(f"blocks must be 1 or more, not {blocks}")
    if channels < 2 or channels % 2:
        raise ValueError(f"channels must be even and 2 or more, not {channels}")
    widths = [channels * 2**level for level in range(LEVELS)]
    skips = [Namespace() for _ in range(LEVELS)]

    def encoder(level: int) -> Iterator[Named]:
        width = widths[level]
        inputs = widths[level - 1] if level else in_channels
        yield from cell(f"encoder{level}", blocks, inputs, width, width, dropout)
        yield f"stash{level}", Stash().isolate(skips[level])
        yield f"pool{level}", nn.MaxPool2d(2)

    def decoder(level: int) -> Iterator[Named]:
        width = widths[level]
        yield f"upsample{level}", nn.Upsample(scale_factor=2)
        yield f"concatenate{level}", Concatenate().isolate(skips[level])
        yield from cell(f"decoder{level}", blocks, 2 * width, width // 2, width // 2, dropout)

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for level in range(LEVELS):
        layers.update(encoder(level))
    deepest = widths[-1]
    layers.update(cell("bottleneck", blocks, deepest, 2 * deepest, deepest, dropout))
    for level in reversed(range(LEVELS)):
        layers.update(decoder(level))
    layers["head"] = nn.Conv2d(channels // 2, out_channels, 1, bias=False)
    return nn.Sequential(layers)


def cell(
    name: str, blocks: int, inputs: int, hidden: int, outputs: int, dropout: float
) -> Iterator[Named]:
    """Yields the named layers of ``blocks`` blocks, with ``hidden`` channels between blocks."""
    widths = [inputs, *[hidden] * (blocks - 1), outputs]
    for index in range(blocks):
        block = f"{name}_{index}"
        before, after = widths[index : index + 2]
        yield f"{block}_conv", nn.Conv2d(before, after, 3, padding=1, bias=False)
        yield f"{block}_dropout", nn.Dropout2d(dropout)
        yield f"{block}_norm", nn.InstanceNorm2d(after)
        # In place saves nearly a third of the memory: nothing else reads the norm's output.
        yield f"{block}_relu", nn.LeakyReLU(0.01, inplace=True)
