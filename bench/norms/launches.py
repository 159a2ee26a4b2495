"""Launches of the norms' kernels that `bench compile` compiles, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from hetconv.kernels.epilogue import ACTIVATIONS, EpilogueSpec
from hetconv.kernels.launch import Launch, LaunchSequence, StridedLayout
from hetconv.kernels.norms.layouts import ImageLayout, as_rows_and_columns
from hetconv.kernels.triton.norms.elementwise import combine_launch, normalize_launch
from hetconv.kernels.triton.norms.statistics import moments_launches, sums_launches

NormPass = Literal["moments", "normalization", "sums", "combination"]
PASSES: tuple[NormPass, ...] = get_args(NormPass)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
GROUPS, EPS = 32, 1e-5
SHAPE, LARGE = (32, 256, 56, 56), (1024, 256, 112, 112)
IMAGES = {
    "channels-last": (SHAPE, (56 * 56 * 256, 1, 56 * 256, 256)),
    "contiguous": (SHAPE, (256 * 56 * 56, 56 * 56, 56, 1)),
    "columns of channels-last": (SHAPE, (56 * 60 * 256, 1, 60 * 256, 256)),
    "columns of contiguous": (SHAPE, (256 * 56 * 60, 56 * 60, 60, 1)),
    "2**31 numbers": (LARGE, (112 * 112 * 256, 1, 112 * 256, 256)),
}
"""Shape and strides of images, by name."""
OF_ALL_SAMPLES = "contiguous"  # the image whose samples share their statistics
FINISHES = ("", *ACTIVATIONS)
"""Activations that are compiled, each with a residual, and none of both."""


@dataclass(frozen=True, order=True)
class NormItem:
    """One launch to compile: the first of the pass, or with ``is_second`` the other."""

    arch: int
    what: NormPass
    dtype: str
    case: str
    activation: str = ""
    is_second: bool = False

    def __str__(self) -> str:
        second = ", second launch" if self.is_second else ""
        activation = f", {self.activation}" if self.activation else ""
        return f"sm_{self.arch} norm's {self.what}{second} {self.dtype} {self.case}{activation}"


def norm_items(archs: Sequence[int], quick: bool = False) -> Iterator[NormItem]:
    """Yields what is compiled: every pass in every layout, with activations where it has any."""
    dtypes = ("bf16",) if quick else DTYPES
    for arch, dtype, what, case in product(archs, dtypes, PASSES, IMAGES):
        activations = (
            FINISHES if what != "moments" and case == "channels-last" else ("",)
        )
        for activation in activations:
            yield NormItem(arch, what, dtype, case, activation)
        is_reduction = what in ("moments", "sums")
        if is_reduction and case in ("channels-last", OF_ALL_SAMPLES):
            yield NormItem(arch, what, dtype, case, is_second=True)


def norm_launch(item: NormItem) -> Launch:
    """Returns the launch of an item."""
    launches = _launches(item).launches
    return launches[-1 if item.is_second else 0]


def _image(item: NormItem) -> StridedLayout:
    layout = ImageLayout(*IMAGES[item.case], DTYPES[item.dtype])
    found = as_rows_and_columns([layout], samples_alike=False)
    assert found is not None
    return found[0]


def _launches(item: NormItem) -> LaunchSequence:
    image = _image(item)
    epilogue = EpilogueSpec(has_scale=True, has_shift=True)
    if item.activation:
        epilogue = epilogue._replace(activation=item.activation, residual=image)
    channels, of_all_samples = image.shape[1], item.case == OF_ALL_SAMPLES
    of_sample = 0 if of_all_samples else channels
    strides = {"mean_stride": of_sample, "scale_stride": 0, "shift_stride": 0}
    match item.what:
        case "moments":
            groups = channels if of_all_samples else GROUPS
            return moments_launches(image, groups, of_all_samples)
        case "normalization":
            return LaunchSequence(
                (normalize_launch(image, image, strides, epilogue, EPS),)
            )
        case "sums":
            return sums_launches(image, image, strides, of_all_samples, epilogue)
        case "combination":
            strides["factor_stride"] = of_sample
            return LaunchSequence(
                (combine_launch(image, image, image, strides, epilogue),)
            )
