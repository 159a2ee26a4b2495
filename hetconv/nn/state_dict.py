"""The state of a split model with the keys and shapes of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from hetconv.comm.consensus import checksum, validate_together
from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup
from hetconv.errors import HetConvError
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.sharding.layout import Box, Shape
from hetconv.sharding.param_shards import ParamShards
from hetconv.torch_internals import (
    keystr,
    make_wrapper,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
)

from .parameters import split_layers
from .split_layer import SplitLayer

T = TypeVar("T")
State = dict[str, Any]


def full_state_dict(model: nn.Module) -> State:
    """Returns the state of the whole model on every rank. Collective.

    Keys and shapes are those of the unsplit model. Every tensor is contiguous and in memory
    of its own, as safetensors needs it.

    Args:
        model: a parallelized model.
    """
    return whole(
        agreed(model, "full_state_dict", lambda: sharded_state_dict(model), signature)
    )


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads what `full_state_dict`, or the unsplit model's ``state_dict``, returned.

    This is collective.

    Args:
        model: a parallelized model.
        state: the state, the same on every rank.

    Raises:
        HetConvError: keys or shapes do not fit on some rank; on every rank, before anything
            changes.
        DisagreementError: ranks were given different values.
    """
    model.load_state_dict(
        agreed(
            model,
            "load_full_state_dict",
            lambda: local_state(model, state),
            lambda _: values(state),
        )
    )


def sharded_state_dict(model: nn.Module) -> State:
    """Returns the state with HetTensors where not every rank has the whole.

    This is local; tensors share the model's memory.
    """
    state = dict(model.state_dict())
    return state | {
        key: share.owned(state[key]) for key, share in shares(model).items()
    }


def local_state(model: nn.Module, state: Mapping[str, Any]) -> State:
    """Returns what this rank's model takes of a state.

    Args:
        model: a parallelized model.
        state: a state of whole tensors, or of slices (`Slice`).
    """
    check_fit(model, {k: shape_of(v) for k, v in state.items()})
    found = shares(model)
    return {k: found[k].of(v) if k in found else v for k, v in state.items()}


def check_fit(model: nn.Module, shapes: Mapping[str, Shape | None]) -> None:
    """Raises `HetConvError` unless these are the whole model's keys and shapes.

    Args:
        model: a parallelized model.
        shapes: by key; None for what is no tensor.
    """
    own = {k: shape_of(v) for k, v in sharded_state_dict(model).items()}
    missing, unknown = (
        sorted(own.keys() - shapes.keys()),
        sorted(shapes.keys() - own.keys()),
    )
    wrong = [
        f"{k}: {shapes[k]}, expected {own[k]}"
        for k in sorted(own.keys() & shapes.keys())
        if shapes[k] != own[k]
    ]
    if missing or unknown or wrong:
        raise HetConvError(
            f"the state does not fit the model: missing {missing}, unknown {unknown}, of "
            f"another shape {wrong}"
        )


class Slice(Tensor):
    """This rank's slice of a tensor, with the shape of the whole; for states alone."""

    local: Tensor
    box: Box

    @classmethod
    def of(cls, local: Tensor, box: Box, shape: Shape) -> Self:
        """Makes a slice.

        Args:
            local: this rank's part.
            box: of ``local`` in the whole.
            shape: of the whole.
        """
        made: Self = make_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.box = local, box
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise HetConvError(
            f"{func} was called on a slice of a tensor that is to be saved or loaded"
        )


class Share(NamedTuple):
    """How a tensor is held that is not whole on every rank."""

    held: ParamShards
    group: RankGroup

    @property
    def box(self) -> Box:
        """Box that this rank holds."""
        return self.held.boxes[self.group.rank]

    def owned(self, local: Tensor) -> HetTensor:
        """Returns a view of what this rank gives, so that every element is given once."""
        own = self.held.primary.boxes[self.group.rank]
        return HetTensor.wrap(
            local_slice(local, self.box, own), self.held.primary, self.group
        )

    def of(self, x: Tensor) -> Tensor:
        """Returns a view of what this rank holds of a whole tensor."""
        return (
            x.local
            if isinstance(x, Slice)
            else local_slice(x, Box.whole(self.held.shape), self.box)
        )


def shares(model: nn.Module) -> dict[str, Share]:
    """Returns, by key, the parameters that are not whole on every rank."""
    return {
        f"{path}.{name}" if path else name: Share(held, layer.group)
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, SplitLayer)
        for name, held in layer.held.items()
        if not held.is_replicated
    }


def agreed(
    model: nn.Module, what: str, prepare: Callable[[], T], saying: Callable[[T], str]
) -> T:
    """Runs `validate_together` among the ranks of a model, if it is parallelized."""
    teams = dict.fromkeys(layer.group for layer in split_layers(model))
    results = [validate_together(group, what, prepare, saying) for group in teams]
    return results[0] if results else prepare()


def whole(state: State) -> State:
    """Returns a state with every HetTensor gathered, all in new memory. Collective."""
    full: State = tree_map_only(
        Tensor,
        lambda x: gather(x).detach().clone(memory_format=torch.contiguous_format),
        state,
    )
    return full


def signature(state: State) -> str:
    """Returns what ranks compare of states of slices: keys, shapes and types."""
    return ", ".join(
        f"{keystr(path)} "
        f"{f'{tuple(x.shape)} {x.dtype}' if isinstance(x, Tensor) else type(x).__name__}"
        for path, x in tree_flatten_with_path(state)[0]
    )


def values(state: Mapping[str, Any]) -> str:
    """Returns what ranks compare of a whole state: a checksum of its values."""
    tensors = [x for x in tree_leaves(dict(state)) if isinstance(x, Tensor)]
    return (
        f"a state of bytes {sum(checksum(x) * (i + 1) for i, x in enumerate(tensors))}"
    )


def shape_of(value: Any) -> Shape | None:
    """Returns the shape of a tensor; None for anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else None
