"""Parameters that move to other shards, with what an optimizer keeps of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetconv import kernels
from hetconv.comm import call_tags
from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup, all_gather_object
from hetconv.comm.redistribute import clone_if_aliased, sum_overlaps
from hetconv.errors import HetConvError
from hetconv.sharding.param_shards import ParamShards
from hetconv.torch_internals import tree_leaves, tree_map_only, tree_structure

Switch = Callable[[], None]
GRADIENT, STATE = "gradient", "state"
"""What moves with a parameter: its gradient, and what the optimizer keeps of it."""


@dataclass(frozen=True, eq=False)
class ShardMove:
    """A parameter that moves to other shards.

    Attributes:
        param: This rank's slice.
        old: Which ranks hold what of it.
        new: Which ranks will.
        channels_last: Whether it is channels-last on all ranks.
        optimizer: Updates it, or None.
    """

    param: nn.Parameter
    old: ParamShards
    new: ParamShards
    channels_last: bool
    optimizer: Optimizer | None

    def companions(self) -> dict[str, Any]:
        """Returns what moves with the parameter; a rank with an empty slice may have nothing."""
        found: dict[str, Any] = {}
        if self.param.grad is not None:
            found[GRADIENT] = self.param.grad
        if self.optimizer is not None and (
            state := self.optimizer.state.get(self.param)
        ):
            found[STATE] = state
        return found


@dataclass(frozen=True)
class Description:
    """What a rank tells of one value that moves with a parameter.

    Attributes:
        dtype: That of a tensor which is sliced as the parameter is; None for other values.
        value: Another value, which is the same on every rank; tensors are in host memory.
        on_device: Whether that value lies where the parameter does.
    """

    dtype: torch.dtype | None = None
    value: Any = None
    on_device: bool = False


Described = Mapping[str, Any]


def described(
    group: RankGroup, what: str, moves: Sequence[ShardMove]
) -> Sequence[Described]:
    """Returns what moves with each parameter, as any rank tells it; collective.

    Raises:
        HetConvError: On every rank, if ranks keep different things of one parameter.
    """
    call_tags.enter(what)
    own = [
        {
            key: tree_map_only(object, _description, kept)
            for key, kept in m.companions().items()
        }
        for m in moves
    ]
    of_ranks = all_gather_object(group, own)
    return [
        _of_owners(what, move, [of_rank[n] for of_rank in of_ranks])
        for n, move in enumerate(moves)
    ]


def _of_owners(
    what: str, move: ShardMove, of_ranks: Sequence[dict[str, Any]]
) -> Described:
    """Returns what the ranks with elements of a parameter tell; those without may lag behind."""
    found: dict[str, Any] = {}
    owned = [box.numel > 0 for box in move.old.primary.boxes]
    for rank in sorted(range(len(of_ranks)), key=lambda r: not owned[r]):
        for key, told in of_ranks[rank].items():
            known = found.setdefault(key, told)
            if tree_structure(known) != tree_structure(told):
                raise HetConvError(
                    f"{what} found different kinds of optimizer state on two ranks: {known} "
                    f"and {told}; use the same optimizer on every rank"
                )
    return found


def _description(x: Any) -> Description:
    if not isinstance(x, Tensor):
        return Description(None, x)
    if x.dim():
        return Description(x.dtype)
    return Description(None, x.detach().cpu(), x.device.type != "cpu")


def reserve_memory(
    group: RankGroup, moves: Iterable[ShardMove], known: Iterable[Described]
) -> None:
    """Allocates the memory of all new slices once, so that a lack of it shows before any moves.

    The allocator of a GPU keeps it for the slices.
    """
    reserved: list[Tensor] = []
    largest = 0
    for move, kept in zip(moves, known, strict=True):
        param, size = move.param, move.new.boxes[group.rank].numel
        dtypes = [leaf.dtype for leaf in tree_leaves(dict(kept)) if leaf.dtype]
        reserved += [param.new_empty(size, dtype=d) for d in (param.dtype, *dtypes)]
        largest = max(largest, param.nbytes + size * param.element_size())
    if reserved:  # pieces of one tensor at a time are on their way
        reserved.append(reserved[0].new_empty(largest, dtype=torch.uint8))


def moved(group: RankGroup, move: ShardMove, kept: Described) -> Switch:
    """Returns what installs a parameter's new slice, and all that moves with it; collective.

    The new slices lie beside the old ones until then.
    """
    send = partial(_moved_slice, group, move)
    data = send(move.param.data)
    companions, own = {}, move.companions()
    for key in sorted(kept):
        # A rank that has nothing to send has zeros of no elements.
        leaves = iter(tree_leaves(own[key])) if key in own else None

        def new(leaf: Description, leaves: Any = leaves) -> Any:
            mine = None if leaves is None else next(leaves)
            if leaf.dtype is None:
                return _value(leaf, move.param.device)
            like = partial(torch.zeros_like, move.param, dtype=leaf.dtype)
            return send(like() if mine is None else mine)

        companions[key] = tree_map_only(Description, new, kept[key])
    return partial(_install, move, data, companions)


def _value(leaf: Description, device: torch.device) -> Any:
    if not isinstance(leaf.value, Tensor):
        return leaf.value
    return leaf.value.to(device) if leaf.on_device else leaf.value.clone()


def _moved_slice(group: RankGroup, move: ShardMove, local: Tensor) -> Tensor:
    """Returns this rank's new slice of a tensor, in memory of its own; collective."""
    held, primary = move.old.boxes[group.rank], move.old.primary.boxes
    owned = local_slice(local.detach(), held, primary[group.rank])
    slice_ = sum_overlaps(group, owned, primary, move.new.boxes)
    memory = torch.contiguous_format
    if move.channels_last:
        memory = kernels.CHANNELS_LAST[local.dim()]
    return clone_if_aliased(slice_, local).contiguous(memory_format=memory)


def _install(move: ShardMove, data: Tensor, companions: Mapping[str, Any]) -> None:
    param = move.param
    param.grad = None
    # Autograd keeps the node of a parameter, with its shape, as long as a graph lives, such
    # as that of the last loss. Another dtype makes it drop the node.
    other = torch.half if data.dtype != torch.half else torch.float
    param.data = data.new_empty(0, dtype=other)
    param.data = data
    param.grad = companions.get(GRADIENT)
    if move.optimizer is not None and STATE in companions:
        move.optimizer.state[param] = companions[STATE]
