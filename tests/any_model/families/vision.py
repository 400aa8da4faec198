"""Lists image models of torchvision and timm, written out here so that they need only torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.any_model.family import Family, Made, made, pixels

__all__ = ["VISION"]

NORMALISED = "batch normalisation uses the statistics of the micro-batch"


def seen(model: nn.Module, size: int = 8) -> Made:
    return made(model, {"x": pixels(size)})


def convolution(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)


class ResNet(nn.Module):
    """A ResNet of four stages of two blocks; each ReLU works in place, after the shortcut too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = convolution(3, 4)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 1, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8))
        self.layer3 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer4 = nn.Sequential(BasicBlock(8, 12), BasicBlock(12, 12))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class BasicBlock(nn.Module):
    """A residual block that calls its one ReLU twice."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = convolution(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        y: Tensor = self.relu(out)
        return y


class VisionTransformer(nn.Module):
    """A vision transformer whose class token and positions are the model's own parameters."""

    def __init__(self, width: int = 16, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 5, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 24, dropout, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x)[:, 0])
        return y


class ConvNeXt(nn.Module):
    """A ConvNeXt whose list of stages alternates with a list of downsampling layers."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 12)) -> None:
        super().__init__()
        sizes = [(3, 2), *((width, 2) for width in widths[:-1])]
        self.downsample_layers = nn.ModuleList(
            nn.Conv2d(inputs, width, size, size)
            for (inputs, size), width in zip(sizes, widths, strict=True)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(ConvNeXtBlock(width), ConvNeXtBlock(width)) for width in widths
        )
        self.head = nn.Sequential(nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 5))

    def forward(self, x: Tensor) -> Tensor:
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        y: Tensor = self.head(x.mean((-2, -1)))
        return y


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        hidden = 2 * width
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.gamma = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.norm(self.dwconv(x).permute(0, 2, 3, 1)))
        return x + (self.gamma * y).permute(0, 3, 1, 2)


class EfficientNet(nn.Module):
    """Inverted bottlenecks with squeeze and excitation, and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 4), nn.BatchNorm2d(4), nn.SiLU(inplace=True))
        self.blocks = nn.ModuleList(
            MBConv(inputs, outputs, stride)
            for inputs, outputs, stride in [(4, 4, 1), (4, 6, 2), (6, 6, 1), (6, 8, 1)]
        )
        self.classifier = nn.Sequential(nn.Dropout(0.0, inplace=True), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.classifier(x.mean((2, 3)))
        return y


class MBConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 2 * inputs
        self.expand = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True),
            convolution(hidden, hidden, stride, groups=hidden), nn.BatchNorm2d(hidden),
            nn.SiLU(inplace=True),
        )  # fmt: skip
        self.squeeze = nn.Sequential(
            nn.Conv2d(hidden, 2, 1), nn.SiLU(inplace=True), nn.Conv2d(2, hidden, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(
            nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        y: Tensor = self.project(hidden * self.squeeze(hidden.mean((2, 3), keepdim=True)))
        return y.add_(x) if self.is_residual else y


class DenseNet(nn.Module):
    """A DenseNet: each layer gets the outputs of all layers before it, across partitions too."""

    def __init__(self, growth: int = 4) -> None:
        super().__init__()
        self.stem = convolution(3, growth)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(growth * k), nn.ReLU(inplace=True), convolution(growth * k, growth)
            )
            for k in range(1, 5)
        )
        self.classifier = nn.Linear(5 * growth, 5)

    def forward(self, x: Tensor) -> Any:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        logits = self.classifier(torch.cat(features, 1).mean((2, 3)))
        return {"logits": logits, "features": features}


VISION: list[Family] = [
    Family(
        "resnet", lambda: seen(ResNet()), ("layer2", "layer4"), mixes_rows=NORMALISED, seldom=False,
        notes="ReLUs in place, called twice",
    ),
    Family(
        "resnet, cut inside of its stages", lambda: seen(ResNet()),
        ("layer1.1", "layer2.1.relu", "layer4.0.downsample"), mixes_rows=NORMALISED,
        notes="four partitions; what is added to a shortcut comes over the border",
    ),
    Family("vit", lambda: seen(VisionTransformer()), ("layers.1", "layers.3"), seldom=False),
    Family(
        "convnext", lambda: seen(ConvNeXt(), 16), ("downsample_layers.1", "stages.2"),
        seldom=False, notes="two lists by turns",
    ),
    Family(
        "efficientnet", lambda: seen(EfficientNet()), ("blocks.1", "blocks.2.project"),
        mixes_rows=NORMALISED, notes="squeeze and excitation, activations in place",
    ),
    Family(
        "densenet", lambda: seen(DenseNet()), ("layers.1", "layers.3"), mixes_rows=NORMALISED,
        seldom=False, notes="skips from each layer to all others, and to the output",
    ),
]  # fmt: skip
