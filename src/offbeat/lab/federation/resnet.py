"""ResNet-18 for small pictures: the first layer has 3 x 3 pixels, and there is no pooling after it.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv 1512.03385; the usual
change for pictures of 32 x 32 pixels.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

_WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.long = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            convolution = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.short = nn.Sequential(convolution, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.long(x) + self.short(x))


def resnet18(channels: int, classes: int = 10) -> nn.Module:
    """Make the net for pictures with so many channels."""
    blocks: list[nn.Module] = []
    before = _WIDTHS[0]
    for number, width in enumerate(_WIDTHS):
        blocks += Block(before, width, 1 if number == 0 else 2), Block(width, width, 1)
        before = width
    return nn.Sequential(
        nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(_WIDTHS[0]),
        nn.ReLU(),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)),
    )
