"""States of a parallelized model, with the keys and shapes of the plain model."""

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
    """Gathers the state of a parallelized model on every rank; collective.

    Args:
        model: The parallelized model.

    Returns:
        The state with the keys and shapes of the plain model. Every tensor is contiguous
        and has its own memory, as safetensors requires.
    """
    return whole(
        agreed(model, "full_state_dict", lambda: sharded_state_dict(model), signature)
    )


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state of the plain model; collective.

    Args:
        model: The parallelized model.
        state: What `full_state_dict`, or ``state_dict`` of the plain model, returned.

    Raises:
        HetConvError: On every rank, before anything changes, if keys or shapes do not
            fit on some rank.
        DisagreementError: On every rank, if ranks were given different values.
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
    """Returns the state with HetTensors where not every rank has the whole; local.

    The tensors share the model's memory.
    """
    state = dict(model.state_dict())
    return state | {
        key: share.owned(state[key]) for key, share in shares(model).items()
    }


def local_state(model: nn.Module, state: Mapping[str, Any]) -> State:
    """Returns what this rank's model loads.

    Args:
        model: The parallelized model.
        state: A state of whole tensors or of `Slice`.

    Raises:
        HetConvError: The state does not fit the model.
    """
    check_fit(model, {k: shape_of(v) for k, v in state.items()})
    found = shares(model)
    return {k: found[k].of(v) if k in found else v for k, v in state.items()}


def check_fit(model: nn.Module, shapes: Mapping[str, Shape | None]) -> None:
    """Checks the keys and shapes of a state.

    Args:
        model: The parallelized model.
        shapes: Shape of each entry; None for what is no tensor.

    Raises:
        HetConvError: They are not those of the plain model.
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
    """Slice of a tensor that has the shape of the whole; only for states.

    Attributes:
        local: The elements that this rank holds.
        box: Their box in the whole tensor.
    """

    local: Tensor
    box: Box

    @classmethod
    def of(cls, local: Tensor, box: Box, shape: Shape) -> Self:
        """Makes the slice of a tensor of a given shape."""
        made: Self = make_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.box = local, box
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise HetConvError(
            f"{func} was called on a slice of a tensor that is to be saved or loaded"
        )


class Share(NamedTuple):
    """Parameter that is not whole on every rank.

    Attributes:
        held: Which ranks hold what of it.
        group: The ranks.
    """

    held: ParamShards
    group: RankGroup

    @property
    def box(self) -> Box:
        """Box of the elements that this rank holds."""
        return self.held.boxes[self.group.rank]

    def owned(self, local: Tensor) -> HetTensor:
        """Wraps this rank's slice; of elements that several ranks hold, one gives them."""
        own = self.held.primary.boxes[self.group.rank]
        return HetTensor.wrap(
            local_slice(local, self.box, own), self.held.primary, self.group
        )

    def of(self, x: Tensor) -> Tensor:
        """Returns a view of what this rank holds of a whole tensor, or of a `Slice`."""
        if isinstance(x, Slice):
            return x.local
        return local_slice(x, Box.whole(self.held.shape), self.box)


def shares(model: nn.Module) -> dict[str, Share]:
    """Returns the parameters that are not whole on every rank, by their state keys."""
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
    """Prepares something on all ranks of a model, or raises on all of them; collective.

    Args:
        model: A plain or parallelized model.
        what: Name of the action, which all ranks must take.
        prepare: Prepares the result.
        saying: Describes the result; all ranks must agree on this text.

    Returns:
        What ``prepare`` returned.
    """
    groups = dict.fromkeys(layer.group for layer in split_layers(model))
    results = [validate_together(group, what, prepare, saying) for group in groups]
    return results[0] if results else prepare()


def whole(state: State) -> State:
    """Returns the state with every HetTensor gathered, in new memory; collective."""
    full: State = tree_map_only(
        Tensor,
        lambda x: gather(x).detach().clone(memory_format=torch.contiguous_format),
        state,
    )
    return full


def signature(state: State) -> str:
    """Describes the keys, shapes and types of a state, which ranks compare."""
    return ", ".join(
        f"{keystr(path)} "
        f"{f'{tuple(x.shape)} {x.dtype}' if isinstance(x, Tensor) else type(x).__name__}"
        for path, x in tree_flatten_with_path(state)[0]
    )


def values(state: Mapping[str, Any]) -> str:
    """Describes the values of a whole state by a checksum, which ranks compare."""
    tensors = [x for x in tree_leaves(dict(state)) if isinstance(x, Tensor)]
    return (
        f"a state of bytes {sum(checksum(x) * (i + 1) for i, x in enumerate(tensors))}"
    )


def shape_of(value: Any) -> Shape | None:
    """Returns the shape of a tensor, and None for anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else None
