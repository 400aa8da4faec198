"""ResNet-101, an image classifier, with the layers of its bottlenecks laid out flat.

A residual connection spans eight layers. Wrapped into one layer, they could not be cut; with the
connection as a skip, a pipeline can cut between any two of them.

He, K.; Zhang, X.; Ren, S.; Sun, J.: Deep residual learning for image recognition. CVPR 2016.
https://arxiv.org/abs/1512.03385
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from models.skips import Add, Stash
from torch import nn

from pipert.skip import Namespace

__all__ = ["resnet", "resnet101"]

EXPANSION = 4  # output channels of a bottleneck per channel inside it

Named = tuple[str, nn.Module]


def resnet101(*, num_classes: int = 1000) -> nn.Sequential:
    """ResNet-101: images ``[batch, 3, 224, 224]`` to logits ``[batch, num_classes]``.

    There are 370 layers. The parameters, their order and their initial values are those of
    torchvision's ``resnet101``.
    """
    return resnet((3, 4, 23, 3), num_classes=num_classes)


def resnet(blocks: Sequence[int], *, num_classes: int = 1000, channels: int = 64) -> nn.Sequential:
    """A ResNet of bottlenecks: images ``[batch, 3, height, width]`` to ``[batch, num_classes]``.

    ::

        stem       7 x 7 convolution, stride 2; 3 x 3 max pooling, stride 2
        stage1     bottlenecks,     64 channels inside and  256 out,  56 x 56
        stage2     bottlenecks,    128 channels inside and  512 out,  28 x 28
        stage3     bottlenecks,    256 channels inside and 1024 out,  14 x 14
        stage4     bottlenecks,    512 channels inside and 2048 out,   7 x 7
        head       mean over the image, linear

    and each bottleneck is eleven layers::

        stash - conv 1x1 - norm - relu - conv 3x3 - norm - relu - conv 1x1 - norm - add - relu
          |                                                                          ^
          `------------------------------------ skip --------------------------------'

    Any image size works. The sizes shown are for 224 x 224 and 64 ``channels``.

    Args:
        blocks: the number of bottlenecks in each stage; (3, 4, 6, 3) makes a ResNet-50.
        num_classes: the number of logits.
        channels: the channels inside the first stage's bottlenecks; each later stage doubles them.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem_conv=nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
        stem_norm=nn.BatchNorm2d(channels),
        stem_relu=nn.ReLU(inplace=True),
        stem_pool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    inputs = channels
    for stage, count in enumerate(blocks):
        inside = channels * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.update(bottleneck(f"stage{stage + 1}_{block}", inputs, inside, stride))
            inputs = EXPANSION * inside
    layers["head_pool"] = nn.AdaptiveAvgPool2d(1)
    layers["head_flatten"] = nn.Flatten()
    layers["head_linear"] = nn.Linear(inputs, num_classes)
    for layer in layers.values():
        for module in layer.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layers)


def bottleneck(name: str, inputs: int, inside: int, stride: int) -> Iterator[Named]:
    """Yields the eleven layers of a bottleneck and their names."""
    outputs, skip = EXPANSION * inside, Namespace()
    projection = None
    if stride > 1 or inputs != outputs:
        projection = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )
    yield f"{name}_stash", Stash().isolate(skip)
    yield f"{name}_conv1", nn.Conv2d(inputs, inside, 1, bias=False)
    yield f"{name}_norm1", nn.BatchNorm2d(inside)
    yield f"{name}_relu1", nn.ReLU(inplace=True)
    yield f"{name}_conv2", nn.Conv2d(inside, inside, 3, stride, padding=1, bias=False)
    yield f"{name}_norm2", nn.BatchNorm2d(inside)
    yield f"{name}_relu2", nn.ReLU(inplace=True)
    yield f"{name}_conv3", nn.Conv2d(inside, outputs, 1, bias=False)
    yield f"{name}_norm3", nn.BatchNorm2d(outputs)
    yield f"{name}_add", Add(projection).isolate(skip)
    yield f"{name}_relu3", nn.ReLU(inplace=True)
