"""Layouts of images of any number of dimensions, as the kernels of norms take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hetconv.kernels.launch import StridedLayout
from hetconv.sharding.conv_spec import Ints


class ImageLayout(NamedTuple):
    """Layout of an image in memory.

    Attributes:
        shape: (N, C, ...), with any number of spatial dimensions.
        strides: In elements.
        dtype: PyTorch's name of the data type.
    """

    shape: Ints
    strides: Ints
    dtype: str

    @staticmethod
    def of(t: Tensor) -> ImageLayout:
        """Returns the layout of a tensor."""
        return ImageLayout(t.shape, t.stride(), str(t.dtype)[6:])


def as_rows_and_columns(
    images: Sequence[ImageLayout], samples_alike: bool
) -> list[StridedLayout] | None:
    """Returns the layouts of images of one shape with two spatial dimensions.

    Dimensions are joined where they follow on each other in all images, so that dense
    ones are one row of pixels, and slices along one dimension are rows.

    Args:
        images: The layouts.
        samples_alike: Whether samples may be joined to one as well.

    Returns:
        The layouts, or None if an image is cut along several dimensions.
    """
    spatial = images[0].shape[2:]
    for rank_of_rows in range(len(spatial) + 1):
        found = [_joined(image, 2 + rank_of_rows) for image in images]
        layouts = [layout for layout in found if layout is not None]
        if len(layouts) < len(images):
            continue
        if samples_alike and all(layout.is_one_row for layout in layouts):
            return [layout.as_one_row() for layout in layouts]
        return layouts
    return None


def _joined(image: ImageLayout, first_column: int) -> StridedLayout | None:
    """Returns a layout whose dimensions from ``first_column`` on are joined to columns."""
    (N, C), (of_sample, of_channel) = image.shape[:2], image.strides[:2]
    rows = _joined_dims(image, 2, first_column)
    columns = _joined_dims(image, first_column, len(image.shape))
    if rows is None or columns is None:
        return None
    shape = (N, C, rows[0], columns[0])
    return StridedLayout(
        shape, (of_sample, of_channel, rows[1], columns[1]), image.dtype
    )


def _joined_dims(image: ImageLayout, first: int, end: int) -> tuple[int, int] | None:
    """Returns size and stride of dimensions joined to one, or None if they cannot be."""
    size, stride = 1, 1
    for dim in reversed(range(first, end)):
        if image.shape[dim] == 1:
            continue
        if size == 1:
            stride = image.strides[dim]
        elif image.strides[dim] != size * stride:
            return None
        size *= image.shape[dim]
    return size, stride
