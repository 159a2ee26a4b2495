"""What all layers that are split among ranks have in common."""

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
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.split import Split

from .sharded_module import ShardedModule

Output = Literal["replicated", "split"]


PlainConv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class SplitLayer(ShardedModule):
    """A layer that is split among ranks. Subclasses say which operator it is.

    Attributes:
        weight: this rank's slice.
        bias: likewise, or None.
        split: how the layer is split.
        output: what `forward` returns: "replicated" (a plain tensor) or "split".
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    split: Split
    output: Output
    as_wired: bool
    """Whether the weight was channels-last when it was cut, on all ranks: its gradients
    travel so.
    """
    called: str = "a layer"
    """What messages of it say that they are of."""

    def forward(self, x: Tensor) -> Tensor:
        """Runs the layer.

        Args:
            x: the input, a plain tensor that is the same on every rank, or a HetTensor.
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
        """Returns the layer's result for an input that all ranks agree on."""

    def __prepare_scriptable__(self) -> Any:
        """`torch.jit.script` asks every module for what it compiles instead."""
        raise HetConvError(
            f"a {type(self).__name__} exchanges messages between ranks, which cannot be "
            "compiled to TorchScript; "
            f"script the plain model before hetconv.parallelize"
        )

    def _allocate(
        self, held: Mapping[str, ParamShards], bias: bool, options: dict[str, Any]
    ) -> None:
        self._adopt_shards(
            {name: of for name, of in held.items() if name == "weight" or bias}
        )
        for name, of in held.items():
            local = (
                nn.Parameter(torch.empty(of.boxes[self.group.rank].shape, **options))
                if name in self.held
                else None
            )
            self.register_parameter(name, local)

    def _result(self, y: Tensor) -> Tensor:
        return gather(y) if self.output == "replicated" else y

    def _agree_on_input(self, x: Tensor) -> None:
        """Checks that the ranks call alike, outside the forward of a parallelized model."""
        said = f"x {tuple(x.shape)} {x.dtype}, {self.split}, gradients {torch.is_grad_enabled()}"
        assert_consensus(self.group, type(self).__name__, said, self.misfit())


def has_wire_format(weight: Tensor) -> bool:
    """Returns whether filters are channels-last, by their strides.

    Strides tell the formats apart even for 1x1 kernels, which are contiguous in both.
    """
    return weight.dim() in kernels.CHANNELS_LAST and weight.stride(
        1
    ) == 1 != weight.stride(-1)


def _check_output(output: str) -> None:
    if output not in get_args(Output):
        raise HetConvError(
            f"output={output!r} is not known; give 'replicated' or 'split'"
        )


def _inherit(
    made: SplitLayer, plain: PlainConv | nn.Linear, held: Mapping[str, ParamShards]
) -> None:
    """Gives a split layer the plain layer's values, hooks and settings."""
    weight = plain.weight
    made._allocate(
        held, plain.bias is not None, {"device": weight.device, "dtype": weight.dtype}
    )
    made.as_wired = has_wire_format(weight)
    if made.as_wired:
        made.weight.data = made.weight.data.to(
            memory_format=kernels.CHANNELS_LAST[weight.dim()]
        )
    made.load_full(dict(plain.named_parameters(recurse=False)))
    for name, p in plain.named_parameters(recurse=False):
        getattr(made, name).requires_grad_(p.requires_grad)
    made.train(plain.training)
