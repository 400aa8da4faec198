"""AmoebaNet-D (L, F), an image classifier found by architecture search, as a flat Sequential.

Every cell reads the outputs of the *two* cells before it. In a flat ``nn.Sequential`` a layer gets
only the previous layer's value, so a cell returns a pair: its own output and its
predecessor's. No other skip connection is needed.

Real, E.; Aggarwal, A.; Huang, Y.; Le, Q. V.: Regularized evolution for image classifier
architecture search. AAAI 2019. https://arxiv.org/abs/1802.01548
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["amoebanet_d"]

Pair = tuple[Tensor, Tensor]
Operation = Callable[[int, int], nn.Module]  # makes the layer for a number of channels and a stride


def amoebanet_d(layers: int = 18, filters: int = 256, *, num_classes: int = 1000) -> nn.Sequential:
    """AmoebaNet-D (L, F): images ``[batch, 3, 224, 224]`` to logits ``[batch, num_classes]``.

    ::

        stem          one convolution, stride 2           112 x 112
        reduction     a reduction cell halves the size     56 x 56
        reduction     and doubles the channels             28 x 28
        L / 3 normal cells                                 28 x 28
        reduction                                          14 x 14
        L / 3 normal cells                                 14 x 14
        reduction                                           7 x 7
        L / 3 normal cells                                  7 x 7
        classifier    mean over the image, linear           logits

    and each layer passes a pair to the next::

        cell k:  (output k-1, output k-2)  ->  (output k, output k-1)

    Other image sizes are fine if a side is a multiple of 32.

    Args:
        layers: L, the number of normal cells; a multiple of three. There are L + 6 layers.
        filters: F, sets the width; a multiple of eight. The last cells work in 4 F channels.
        num_classes: the number of logits.

    Raises:
        ValueError: ``layers`` or ``filters`` is not such a multiple.
    """
    if layers < 3 or layers % 3:
        raise ValueError(f"layers must be a positive multiple of 3, not {layers}")
    if filters < 8 or filters % 8:
        raise ValueError(f"filters must be a positive multiple of 8, not {filters}")
    third = [NORMAL] * (layers // 3)
    designs = [REDUCTION, REDUCTION, *third, REDUCTION, *third, REDUCTION, *third]

    channels = filters // 4
    named: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(channels))
    output = before = channels  # the channels of the pair
    after_reduction = False
    for index, design in enumerate(designs):
        channels *= design.stride
        name = "reduction" if design is REDUCTION else "normal"
        named[f"cell{index}_{name}"] = Cell(design, output, before, channels, after_reduction)
        output, before = channels * len(design.concatenated), output
        after_reduction = design is REDUCTION
    named["classifier"] = Classifier(output, num_classes)
    return nn.Sequential(named)


# --- the layers of the Sequential -----------------------------------------------------------------


class Stem(nn.Module):
    """The first convolution: turns an image into the first cell's pair, twice the same tensor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolve = relu_conv_norm(3, channels, (3, 3), (2, 2))

    def forward(self, image: Tensor) -> Pair:
        x = self.convolve(image)
        return x, x


class Cell(nn.Module):
    """A normal or a reduction cell: maps the last two outputs to its own and the last one.

    ::

        previous output ------ fit ---> state 0 ----+
                                                    |   each pair of operations
        output before that --- fit ---> state 1 ----+-> adds one more state:      -> some states,
                                                    |   f(state a) + g(state b)      concatenated
                                        states 2.. -+

    Args:
        design: which operations, and on which states.
        output, before: channels of the two tensors of the input pair.
        channels: channels of every state.
        after_reduction: whether the pair's second tensor has twice the side of its first.
    """

    def __init__(
        self, design: Design, output: int, before: int, channels: int, after_reduction: bool
    ) -> None:
        super().__init__()
        self.sources = [source for source, _ in design.operations]
        self.concatenated = design.concatenated
        self.fit_output = relu_conv_norm(output, channels)
        self.fit_before: nn.Module
        if after_reduction:
            self.fit_before = FactorizedReduction(before, channels)
        elif before != channels:
            self.fit_before = relu_conv_norm(before, channels)
        else:
            self.fit_before = nn.Identity()
        self.operations = nn.ModuleList(
            # Only the two input states have the size before the reduction.
            operation(channels, design.stride if source < 2 else 1)
            for source, operation in design.operations
        )

    def forward(self, pair: Pair) -> Pair:
        output, before = pair
        states = [self.fit_output(output), self.fit_before(before)]
        steps = zip(self.operations, self.sources, strict=True)
        for (first, a), (second, b) in zip(steps, steps, strict=True):  # two at a time
            states.append(first(states[a]) + second(states[b]))
        return torch.cat([states[index] for index in self.concatenated], dim=1), output


class Classifier(nn.Module):
    """The mean over the image of a pair's first tensor, then a linear layer."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, pair: Pair) -> Tensor:
        # At the published image size, this is the 7 x 7 average pooling of the original.
        logits: Tensor = self.linear(pair[0].mean(dim=(2, 3)))
        return logits


# --- the operations of a cell ---------------------------------------------------------------------


def relu_conv_norm(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """ReLU, convolution, batch norm; at stride 1 the image keeps its size."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),  # not in place: other operations read the same state
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


class FactorizedReduction(nn.Module):
    """Halves the image with two convolutions; each sees the pixels the other skips."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]  # by one pixel, up and to the left
        halves: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return halves


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return relu_conv_norm(channels, channels, (1, 1), (stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        relu_conv_norm(channels, narrow),
        relu_conv_norm(narrow, narrow, (3, 3), (stride, stride)),
        relu_conv_norm(narrow, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        relu_conv_norm(channels, narrow),
        relu_conv_norm(narrow, narrow, (1, 7), (1, stride)),
        relu_conv_norm(narrow, narrow, (7, 1), (stride, 1)),
        relu_conv_norm(narrow, channels),
    )


# --- the two designs found by evolution -----------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """The operations of a cell, two per new state, each with the state that it reads."""

    stride: int
    operations: tuple[tuple[int, Operation], ...]
    concatenated: tuple[int, ...]


NORMAL = Design(
    stride=1,
    operations=(
        (1, conv_1x1), (1, max_pool_3x3),  # state 2
        (1, none), (0, conv_1x7_7x1),  # state 3
        (0, conv_1x1), (0, conv_1x7_7x1),  # state 4
        (2, max_pool_3x3), (2, none),  # state 5
        (1, avg_pool_3x3), (5, conv_1x1),  # state 6
    ),
    concatenated=(0, 3, 4, 6),
)  # fmt: skip

REDUCTION = Design(
    stride=2,
    operations=(
        (0, max_pool_2x2), (0, max_pool_3x3),  # state 2
        (2, none), (1, conv_3x3),  # state 3
        (2, conv_1x7_7x1), (2, max_pool_3x3),  # state 4
        (3, none), (1, max_pool_2x2),  # state 5
        (2, avg_pool_3x3), (3, conv_1x1),  # state 6
    ),
    concatenated=(4, 5, 6),
)  # fmt: skip
