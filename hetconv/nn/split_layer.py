"""Base class of split layers, and how they take over a plain layer's parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hetconv import kernels
from hetconv.comm import call_tags
from hetconv.comm.consensus import assert_consensus
from hetconv.errors import HetConvError
from hetconv.runtime.gradient_sync import ACTIVE_SYNC
from hetconv.runtime.het_tensor import gather
from hetconv.schemas.plan import LayerPlan
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.split import Split

from .sharded_module import ShardedModule

Output = Literal["replicated", "split"]


class SplitLayer(ShardedModule):
    """Layer that is split among ranks.

    Attributes:
        weight: This rank's slice of the weight.
        bias: This rank's slice of the bias, or None.
        split: How the layer is split.
        output: Whether the result is "replicated" or "split".
        as_wired: Whether the weight was channels-last when it was split, on all ranks.
            Its gradients are sent in this memory format.
        called: Name of the layer in the tags of its messages.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    split: Split
    output: Output
    as_wired: bool
    called: str = "a layer"

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer's result.

        Args:
            x: A plain tensor, the same on every rank, or a HetTensor.
        """
        if ACTIVE_SYNC.get() is None:
            if self.context is None:
                self._agree_on_input(x)
            elif self.context.is_entry(self):
                return self.context.call(self, self._run, (x,), {})  # type: ignore[no-any-return]
        call_tags.enter_layer(self.called)
        return self._run(x)

    @abstractmethod
    def _run(self, x: Tensor) -> Tensor:
        """Computes the layer's result of an input that all ranks agree on."""

    def follows(self, planned: LayerPlan) -> bool:
        """Returns whether the layer is split as planned already."""
        return self.split == planned.split

    def adopt_split(self, planned: LayerPlan, held: Mapping[str, ParamShards]) -> None:
        """Makes a planned split the layer's own, once its parameters are the new slices.

        Args:
            planned: Plan of the layer.
            held: Which ranks hold what of each parameter from now on.
        """
        self.split = planned.split
        self._adopt_shards({name: held[name] for name in self.held})

    def __prepare_scriptable__(self) -> Any:
        """Refuses `torch.jit.script`, which asks here for what it compiles."""
        raise HetConvError(
            f"a {type(self).__name__} exchanges messages between ranks, which cannot be "
            "compiled to TorchScript; "
            f"script the plain model before hetconv.parallelize"
        )

    def _allocate(
        self, held: Mapping[str, ParamShards], bias: bool, options: dict[str, Any]
    ) -> None:
        names = ("weight", "bias") if bias else ("weight",)
        self._adopt_shards({name: held[name] for name in names})
        for name, shards in held.items():
            local = torch.empty(shards.boxes[self.group.rank].shape, **options)
            param = nn.Parameter(local) if name in names else None
            self.register_parameter(name, param)

    def _result(self, y: Tensor) -> Tensor:
        return gather(y) if self.output == "replicated" else y

    def _agree_on_input(self, x: Tensor) -> None:
        """Checks that ranks call alike, for a layer outside of a parallelized model."""
        call = f"x {tuple(x.shape)} {x.dtype}, {self.split}, gradients {torch.is_grad_enabled()}"
        assert_consensus(self.group, type(self).__name__, call, self.misfit())


def check_output(output: str) -> None:
    """Raises `HetConvError` unless ``output`` is "replicated" or "split"."""
    if output not in get_args(Output):
        raise HetConvError(
            f"output={output!r} is not known; give 'replicated' or 'split'"
        )


def inherit(layer: SplitLayer, plain: Any, held: Mapping[str, ParamShards]) -> None:
    """Gives a split layer the plain one's parameters, memory format and mode.

    Args:
        layer: The split layer.
        plain: The plain convolution or linear layer.
        held: Which ranks hold what of each parameter.
    """
    weight = plain.weight
    options = {"device": weight.device, "dtype": weight.dtype}
    layer._allocate(held, plain.bias is not None, options)
    layer.as_wired = kernels.is_channels_last(weight)
    if layer.as_wired:
        last = kernels.CHANNELS_LAST[weight.dim()]
        layer.weight.data = layer.weight.data.to(memory_format=last)
    layer.load_full(dict(plain.named_parameters(recurse=False)))
    for name, p in plain.named_parameters(recurse=False):
        getattr(layer, name).requires_grad_(p.requires_grad)
    layer.train(plain.training)
