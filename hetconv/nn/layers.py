"""Layers that are split among ranks, with their slices of the parameters."""

from __future__ import annotations

from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hetconv.comm.consensus import validate_together
from hetconv.comm.rank_group import RankGroup, broadcast, rank_group_of
from hetconv.errors import HetConvError
from hetconv.operators.layers import CONVS, conv_spec, is_plain
from hetconv.ops.conv import ConvCase, conv_case, convolution, linear
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import layout_of
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import Layout, Shape
from hetconv.sharding.split import Split

from .split_layer import (
    Output,
    PlainConv,
    SplitLayer,
    _check_output,
    _inherit,
    has_wire_format,
)

MAX_LAYOUTS = 256  # of inputs for which a layer remembers how it runs
CONV_ATTRIBUTES = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)


class HetConv(SplitLayer):
    """A split convolution of any rank. See `HetConv1d`, `HetConv2d` and `HetConv3d`."""

    spatial_dims: ClassVar[int]
    fusible: tuple[str, ...] = ()
    """The functions that without autograd are computed as the result is stored, if they
    alone consume it.
    """
    chunks: int = 1
    """Of the batch: without autograd each travels while the next is computed, where a
    filter split is gathered.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        split: Split,
        group: dist.ProcessGroup | None = None,
        output: Output = "replicated",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.group = rank_group_of(group)
        args = (
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
        )

        def check() -> PlainConv:
            try:
                plain = CONVS[self.spatial_dims - 1](*args, device=device, dtype=dtype)  # type: ignore[arg-type]
            except (ValueError, TypeError, RuntimeError) as e:
                raise HetConvError(str(e)) from e
            _check_output(output)
            minimal_op(plain).check(split, self.group.size)
            return plain

        plain = validate_together(
            self.group,
            type(self).__name__,
            check,
            lambda _: f"{args} {split} {output} {dtype}",
        )
        broadcast(self.group, [p.data for p in plain.parameters()])
        self._adopt(plain, split, output)

    @classmethod
    def from_conv(
        cls,
        conv: PlainConv,
        split: Split,
        *,
        group: dist.ProcessGroup | None = None,
        output: Output = "replicated",
    ) -> Self:
        """Splits a convolution. Collective.

        Args:
            conv: a plain convolution, which stays as it is. Rank 0's weights are used.
            split: how it is split.
            group: the ranks; None for all.
            output: "replicated" for a plain tensor on every rank, "split" for a HetTensor.

        Raises:
            SplitError: the split does not fit; on every rank.
        """
        rank_group = rank_group_of(group)

        def check() -> None:
            plain = CONVS[cls.spatial_dims - 1]
            if not isinstance(conv, plain):
                given = type(conv).__name__
                raise HetConvError(
                    f"from_conv takes a torch.nn.{plain.__name__}, but was given a {given}"
                )
            if not is_plain(conv):
                raise HetConvError(
                    f"the {type(conv).__name__} computes or keeps its weight in a way of its own"
                )
            _check_output(output)
            minimal_op(conv).check(split, rank_group.size)

        validate_together(
            rank_group,
            f"{cls.__name__}.from_conv",
            check,
            lambda _: (
                f"{conv} {split} {output} {conv.weight.dtype} {has_wire_format(conv.weight)}"
            ),
        )
        made = cls._local(conv, split, rank_group, output)
        full = {name: p.detach().clone() for name, p in conv.named_parameters()}
        broadcast(rank_group, list(full.values()))
        made.load_full(full)
        return made

    @classmethod
    def _local(
        cls, conv: PlainConv, split: Split, group: RankGroup, output: Output
    ) -> Self:
        """Splits a convolution whose arguments are checked and whose weights are rank 0's."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.group = group
        made._adopt(conv, split, output)
        return made

    def _adopt(self, conv: PlainConv, split: Split, output: Output) -> None:
        for name in CONV_ATTRIBUTES:
            setattr(self, name, getattr(conv, name))
        self._reversed_padding = conv._reversed_padding_repeated_twice
        self.split, self.output = split, output
        self._ways: dict[int, ConvCase] = {}  # by the id of the input's layout
        _inherit(self, conv, minimal_op(conv).param_shards(split, self.group.size))

    def _plain(self) -> nn.Module:
        options: Any = {name: getattr(self, name) for name in CONV_ATTRIBUTES}
        return CONVS[self.spatial_dims - 1](
            **options, bias="bias" in self.held, device="meta"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CONV_ATTRIBUTES and (ways := vars(self).get("_ways")):
            ways.clear()  # they go by these
        super().__setattr__(name, value)

    def _run(self, x: Tensor) -> Tensor:
        if x.dim() == self.spatial_dims + 1:
            return self._run(x.unsqueeze(0)).squeeze(0)
        if self.padding_mode != "zeros":
            self._check(tuple(x.shape))
            x = F.pad(x, self._reversed_padding, mode=cast(str, self.padding_mode))
        src = x.placement if isinstance(x, HetTensor) else layout_of(x, self.group)
        way = self._ways.get(id(src))
        if (
            way is None or way.src is not src
        ):  # a copy of this layer has the ids of another one's layouts
            way = self._way_of(src)
        w, b = self._slice("weight"), self._parameters["bias"]
        y = convolution(x, w, b, way, self.group, self.fusible, self.chunks)
        return y if self.output == "split" else self._result(y)

    def _check(self, x_shape: Shape) -> None:
        if len(x_shape) != self.spatial_dims + 2 or x_shape[1] != self.in_channels:
            expected = ", ".join(
                ["N", str(self.in_channels), *"DHW"[-self.spatial_dims :]]
            )
            raise HetConvError(
                f"{type(self).__name__} expects ({expected}), but was given {x_shape}"
            )

    def _way_of(self, src: Layout) -> ConvCase:
        self._check(src.shape)
        op = conv_op(self, src.shape, self._slice("weight").dtype)
        if min(op.spec.y_shape[2:]) < 1:
            raise HetConvError(
                f"an input of {src.shape} is smaller than the kernel {self.kernel_size} of {self}"
            )
        if len(self._ways) >= MAX_LAYOUTS:
            del self._ways[next(iter(self._ways))]
        self._ways[id(src)] = way = conv_case(op, src, self.split, self.group)
        return way

    def extra_repr(self) -> str:
        """Returns the options as they are printed."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"split={self.split}"
        )


class HetConv1d(HetConv):
    """A split 1-D convolution, of (N, C, W). See `HetConv2d`."""

    spatial_dims = 1


class HetConv2d(HetConv):
    """A 2-D convolution that is split among ranks; otherwise `torch.nn.Conv2d`.

    The input (N, C, H, W) is a plain tensor, the same on every rank, or a HetTensor. The
    output (N, K, P, Q) is a plain tensor on every rank (``output="replicated"``) or a
    HetTensor (``"split"``). Constructing it is collective; rank 0's weights are used.

    Attributes:
        weight: what this rank computes with: its slice under ``filter`` and ``channel``
            splits, else the whole, and nothing on a rank with size zero.
        bias: likewise, or None.

    Raises:
        SplitError: arguments are wrong on a rank; on every rank.
    """

    spatial_dims = 2


class HetConv3d(HetConv):
    """A split 3-D convolution, of (N, C, D, H, W). See `HetConv2d`."""

    spatial_dims = 3


HET_CONVS: tuple[type[HetConv], ...] = (HetConv1d, HetConv2d, HetConv3d)
"""By spatial dimensions, from one on."""


class HetLinear(SplitLayer):
    """A split linear layer, which `parallelize` makes of a `torch.nn.Linear`."""

    def __init__(
        self,
        linear: nn.Linear,
        split: Split,
        group: RankGroup,
        output: Output = "split",
    ):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self.split, self.output = group, split, output
        _inherit(
            self,
            linear,
            Linear((1, self.in_features), self.out_features).param_shards(
                split, group.size
            ),
        )

    def _plain(self) -> nn.Module:
        return nn.Linear(
            self.in_features, self.out_features, "bias" in self.held, device="meta"
        )

    def _run(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise HetConvError(
                f"HetLinear expects (..., {self.in_features}), but was given {tuple(x.shape)}"
            )
        op = Linear(tuple(x.shape), self.out_features)
        w, b = self._slice("weight"), self._parameters["bias"]
        return self._result(linear(x, w, b, op, self.split, self.group))

    def extra_repr(self) -> str:
        """Returns the options as they are printed."""
        return f"{self.in_features}, {self.out_features}, split={self.split}"


def conv_op(conv: Any, x_shape: tuple[int, ...], dtype: torch.dtype) -> Conv:
    """Returns the operator of a convolution on an input of this shape.

    Args:
        conv: a plain or split convolution.
        x_shape: shape of the input.
        dtype: of the input.
    """
    w_shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    padding = 0 if conv.padding_mode != "zeros" else conv.padding
    return Conv(
        conv_spec(
            x_shape, w_shape, dtype, conv.stride, padding, conv.dilation, conv.groups
        )
    )


def minimal_op(conv: PlainConv) -> Conv:
    """Returns the operator on an input of one pixel.

    Which splits fit does not depend on the size of the input.
    """
    return conv_op(
        conv, (1, conv.in_channels, *(1,) * len(conv.kernel_size)), conv.weight.dtype
    )
