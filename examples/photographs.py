"""The photographs that scikit-image ships, at two resolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import skimage.data
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.edsr import SCALE

TRAINING = ("coffee", "chelsea", "rocket")
HELD_OUT = "astronaut"


@dataclass(frozen=True)
class Pair:
    """A photograph (1, 3, 2H, 2W), values 0 to 1, and the same at low resolution (1, 3, H, W)."""

    low: Tensor
    high: Tensor


def load(name: str) -> Pair:
    """Cropped to even sizes, shrunk by anti-aliased bicubic interpolation."""
    image = (
        torch.from_numpy(getattr(skimage.data, name)().copy())
        .movedim(-1, 0)
        .unsqueeze(0)
        / 255
    )
    high = image[
        ..., : image.shape[2] // SCALE * SCALE, : image.shape[3] // SCALE * SCALE
    ]
    low = F.interpolate(
        high, scale_factor=1 / SCALE, mode="bicubic", antialias=True
    ).clamp(0, 1)
    return Pair(low.contiguous(), high.contiguous())


def bicubic(low: Tensor) -> Tensor:
    return F.interpolate(low, scale_factor=SCALE, mode="bicubic").clamp(0, 1)


def psnr(image: Tensor, truth: Tensor) -> float:
    """Decibels; more is closer to the truth."""
    return -10 * math.log10((image.clamp(0, 1) - truth).square().mean().item())


class Batches:
    """Random crops, flipped and turned; with the same seed the same ones, as every rank
    needs them.
    """

    def __init__(self, size: int, seed: int):
        self._pairs, self._size = [load(name) for name in TRAINING], size
        self._seed, self._generator = seed, torch.Generator().manual_seed(seed)

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (), generator=self._generator))

    def at(self, step: int) -> Pair:
        """The crop of a step, the same also in a program that begins at that step."""
        self._generator.manual_seed(self._seed + step)
        return self.next()

    def next(self) -> Pair:
        pair, size = self._pairs[self._below(len(self._pairs))], self._size
        top, left = (self._below(extent - size + 1) for extent in pair.low.shape[2:])
        flips = [dim for dim in (2, 3) if self._below(2)]
        turned = self._below(2)

        def crop(image: Tensor, scale: int) -> Tensor:
            rows, columns = (
                slice(at * scale, (at + size) * scale) for at in (top, left)
            )
            part = image[..., rows, columns].flip(flips)
            return (part.mT if turned else part).contiguous()

        return Pair(crop(pair.low, 1), crop(pair.high, SCALE))
