"""Split convolutions and linear layers, which hold this rank's slice of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hetconv.comm.consensus import validate_together
from hetconv.comm.rank_group import RankGroup, broadcast, rank_group_of
from hetconv.errors import HetConvError
from hetconv.kernels import is_channels_last
from hetconv.operators.layers import CONVS, conv_spec, is_plain
from hetconv.ops.conv import ConvCase, conv_case, convolution, linear
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import layout_of
from hetconv.schemas.plan import LayerPlan
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import Layout, Shape
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.split import Split

from .split_layer import Output, SplitLayer, check_output, inherit

PlainConv = nn.Conv1d | nn.Conv2d | nn.Conv3d
MAX_CACHED_CASES = 256
"""Number of input layouts for which a layer caches how it runs."""
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
    """Split convolution: the base class of `HetConv1d`, `HetConv2d` and `HetConv3d`.

    Attributes:
        spatial_dims: Number of spatial dimensions.
        fusible: Names of the functions that consume the result, in order. Without
            autograd they are fused into the convolution.
        chunks: Number of chunks of the batch in which the result of a filter split is
            gathered without autograd: each travels while the next is computed.
    """

    spatial_dims: ClassVar[int]
    fusible: tuple[str, ...] = ()
    chunks: int = 1

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
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation)
        args = (*shape, groups, bias, padding_mode)

        def check() -> PlainConv:
            try:
                plain = CONVS[self.spatial_dims - 1](*args, device=device, dtype=dtype)  # type: ignore[arg-type]
            except (ValueError, TypeError, RuntimeError) as e:
                raise HetConvError(str(e)) from e
            check_output(output)
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
        """Makes a split convolution with rank 0's weights; collective.

        Args:
            conv: A plain convolution, which is left as it is.
            split: How to split it.
            group: The ranks; all of them by default.
            output: Whether the result is "replicated" or "split".

        Returns:
            The split convolution.

        Raises:
            HetConvError: On every rank, if the convolution cannot be split like this.
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
            check_output(output)
            minimal_op(conv).check(split, rank_group.size)

        validate_together(
            rank_group,
            f"{cls.__name__}.from_conv",
            check,
            lambda _: (
                f"{conv} {split} {output} {conv.weight.dtype} {is_channels_last(conv.weight)}"
            ),
        )
        layer = cls._local(conv, split, rank_group, output)
        full = {name: p.detach().clone() for name, p in conv.named_parameters()}
        broadcast(rank_group, list(full.values()))
        layer.load_full(full)
        return layer

    @classmethod
    def _local(
        cls, conv: PlainConv, split: Split, group: RankGroup, output: Output
    ) -> Self:
        """Makes a split convolution without communication, of checked arguments."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.group = group
        layer._adopt(conv, split, output)
        return layer

    def _adopt(self, conv: PlainConv, split: Split, output: Output) -> None:
        for name in CONV_ATTRIBUTES:
            setattr(self, name, getattr(conv, name))
        self._reversed_padding = conv._reversed_padding_repeated_twice
        self.split, self.output = split, output
        self._cases: dict[int, ConvCase] = {}  # by the id of the input's layout
        inherit(self, conv, minimal_op(conv).param_shards(split, self.group.size))

    def _plain(self) -> nn.Module:
        options: Any = {name: getattr(self, name) for name in CONV_ATTRIBUTES}
        return CONVS[self.spatial_dims - 1](
            **options, bias="bias" in self.held, device="meta"
        )

    def follows(self, planned: LayerPlan) -> bool:
        """Returns whether the layer is split as planned already."""
        return super().follows(planned) and self.chunks == planned.chunks

    def adopt_split(self, planned: LayerPlan, held: Mapping[str, ParamShards]) -> None:
        """Makes a planned split the layer's own, once its parameters are the new slices."""
        super().adopt_split(planned, held)
        self.chunks = planned.chunks
        self._cases.clear()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CONV_ATTRIBUTES and (cases := vars(self).get("_cases")):
            cases.clear()  # they depend on these attributes
        super().__setattr__(name, value)

    def _run(self, x: Tensor) -> Tensor:
        if x.dim() == self.spatial_dims + 1:
            return self._run(x.unsqueeze(0)).squeeze(0)
        if self.padding_mode != "zeros":
            self._check(tuple(x.shape))
            x = F.pad(x, self._reversed_padding, mode=cast(str, self.padding_mode))
        src = x.placement if isinstance(x, HetTensor) else layout_of(x, self.group)
        case = self._cases.get(id(src))
        # A copy of this layer has the ids of another layer's layouts.
        if case is None or case.src is not src:
            case = self._new_case(src)
        w, b = self.parameter_slice("weight"), self._parameters["bias"]
        y = convolution(x, w, b, case, self.group, self.fusible, self.chunks)
        return y if self.output == "split" else self._result(y)

    def _check(self, x_shape: Shape) -> None:
        if len(x_shape) != self.spatial_dims + 2 or x_shape[1] != self.in_channels:
            expected = ", ".join(
                ["N", str(self.in_channels), *"DHW"[-self.spatial_dims :]]
            )
            raise HetConvError(
                f"{type(self).__name__} expects ({expected}), but was given {x_shape}"
            )

    def _new_case(self, src: Layout) -> ConvCase:
        self._check(src.shape)
        op = conv_op(self, src.shape, self.parameter_slice("weight").dtype)
        if min(op.spec.y_shape[2:]) < 1:
            raise HetConvError(
                f"an input of {src.shape} is smaller than the kernel {self.kernel_size} of {self}"
            )
        if len(self._cases) >= MAX_CACHED_CASES:
            del self._cases[next(iter(self._cases))]
        self._cases[id(src)] = case = conv_case(op, src, self.split, self.group)
        return case

    def extra_repr(self) -> str:
        """Returns what `repr` shows of the layer."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"split={self.split}"
        )


class HetConv1d(HetConv):
    """Split 1-D convolution of (N, C, W); see `HetConv2d`."""

    spatial_dims = 1


class HetConv2d(HetConv):
    """Split 2-D convolution, otherwise like `torch.nn.Conv2d`.

    The input (N, C, H, W) is a plain tensor, the same on every rank, or a HetTensor.
    The output (N, K, P, Q) is a plain tensor on every rank, or a HetTensor if
    ``output`` is "split". ``weight`` is this rank's slice under ``filter`` and
    ``channel`` splits, and empty on a rank without a share. The constructor is
    collective, and all ranks get rank 0's weights.

    Args:
        in_channels: As in `torch.nn.Conv2d`, like the following arguments.
        out_channels: Number of filters.
        kernel_size: Size of the kernel.
        stride: Stride of the kernel.
        padding: Padding on both sides, or "same" or "valid".
        dilation: Distance of the kernel's taps.
        groups: Number of groups of channels.
        bias: Whether there is a bias.
        padding_mode: What the padding holds.
        split: How the layer is split among the ranks.
        group: The ranks; all of them by default.
        output: Whether the result is "replicated" or "split".
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        SplitError: On every rank, if the layer cannot be split like this.
        HetConvError: On every rank, if arguments are wrong on one.
    """

    spatial_dims = 2


class HetConv3d(HetConv):
    """Split 3-D convolution of (N, C, D, H, W); see `HetConv2d`."""

    spatial_dims = 3


HET_CONVS: tuple[type[HetConv], ...] = (HetConv1d, HetConv2d, HetConv3d)
"""Split convolutions of one, two and three spatial dimensions."""


class HetLinear(SplitLayer):
    """Split linear layer, which `parallelize` makes from a `torch.nn.Linear`.

    Args:
        linear: The plain layer.
        split: How it is split.
        group: The ranks.
        output: Whether the result is "replicated" or "split".
    """

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
        inherit(self, linear, minimal_op(linear).param_shards(split, group.size))

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
        w, b = self.parameter_slice("weight"), self._parameters["bias"]
        return self._result(linear(x, w, b, op, self.split, self.group))

    def extra_repr(self) -> str:
        """Returns what `repr` shows of the layer."""
        return f"{self.in_features}, {self.out_features}, split={self.split}"


def conv_op(conv: Any, x_shape: tuple[int, ...], dtype: torch.dtype) -> Conv:
    """Returns the operator of a convolution module on an input of a given shape.

    Args:
        conv: A plain or split convolution.
        x_shape: Shape of the input (N, C, *size), before padding other than zeros.
        dtype: That of the weight.
    """
    w_shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    padding = 0 if conv.padding_mode != "zeros" else conv.padding
    options = (conv.stride, padding, conv.dilation, conv.groups)
    return Conv(conv_spec(x_shape, w_shape, dtype, *options))


def minimal_op(layer: PlainConv | nn.Linear | SplitLayer) -> Conv | Linear:
    """Returns the operator on an input of one pixel, to check splits with.

    Args:
        layer: A plain or split convolution or linear layer.
    """
    if isinstance(layer, (nn.Linear, HetLinear)):
        # An input may have up to three dimensions between samples and features.
        return Linear((1, 1, 1, 1, layer.in_features), layer.out_features)
    conv: Any = layer
    pixel = (1,) * len(conv.kernel_size)
    return conv_op(conv, (1, conv.in_channels, *pixel), conv.weight.dtype)
