"""Base class of modules whose parameters are sharded.

Whatever torch does with the parameters of a module acts on the whole parameters, or is
refused where it would give wrong results on slices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hetconv.comm.consensus import assert_consensus, validate_together
from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup, broadcast
from hetconv.errors import HetConvError
from hetconv.runtime.gradient_sync import ACTIVE_SYNC, in_recomputation, synced_grad
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.sharding.layout import Box, Shape
from hetconv.sharding.param_shards import ParamShards
from hetconv.torch_internals import write_count
from hetconv.torch_patches import (
    check_before_clipping,
    check_before_replicating,
    check_before_unscaling,
    register_patch,
)

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as parameters, hooks and the mode."""
Versions = dict[str, tuple[int, int]]
"""For each parameter the id of its tensor, and how many times that was written to."""


class _Parameters(dict[str, nn.Parameter | None]):
    """Parameters of a sharded module, which are whole if read within a call of the model."""

    def __init__(self, module: ShardedModule):
        super().__init__(module._parameters)
        self._module = module

    def items(self) -> Any:
        if not self._module._within_call():
            return super().items()
        return {name: self._module._read(name) for name in self}.items()

    def values(self) -> Any:
        return dict(self.items()).values()


class ShardedModule(nn.Module, ABC):
    """Module whose parameters are sharded.

    Within a call of the model a parameter that user code reads, such as a penalty or a
    tied decoder, is whole, and so is its gradient. Outside of calls it is this rank's
    slice, which an optimizer updates.

    Attributes:
        group: The ranks.
        held: Which ranks hold what of each parameter.
        context: What the calls of the parallelized model share (`ModelContext`), or None.
    """

    group: RankGroup
    held: dict[str, ParamShards]
    context: Any = None
    _shapes: tuple[tuple[str, Shape], ...]  # of the slices that this rank holds

    def _adopt_shards(self, held: Mapping[str, ParamShards]) -> None:
        """Sets which ranks hold what of this module's parameters."""
        self.held = dict(held)
        self.__dict__["_parameters"] = _Parameters(self)
        self._shapes = tuple(
            (name, of.boxes[self.group.rank].shape) for name, of in held.items()
        )
        _sharded.add(self)

    def parameter_slice(self, name: str) -> nn.Parameter:
        """Returns what this rank holds of a parameter."""
        own = self._parameters[name]
        assert own is not None
        return own

    def misfit(self) -> HetConvError | None:
        """Returns an error if a parameter does not have the shape of this rank's slice.

        `torch.func.functional_call` may give it another one.
        """
        for name, shape in self._shapes:
            given = self._parameters.get(name)
            if given is None or given.shape != shape:
                found = None if given is None else tuple(given.shape)
                return HetConvError(
                    f"the {name} of a {type(self).__name__}({self.extra_repr()}) has the shape "
                    f"{found}, but this rank "
                    f"holds {shape} of {self.held[name].shape}; give functional_call the shapes of "
                    f"model.named_parameters()"
                )
        return None

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and self._within_call():
            return self._read(name)
        return super().__getattr__(name)

    def _within_call(self) -> bool:
        """Returns whether a call of the model, or its recomputation, is active."""
        scope, context = ACTIVE_SYNC.get(), self.context
        return context is not None and (
            scope.owner is context if scope is not None else in_recomputation()
        )

    def _read(self, name: str) -> Tensor | None:
        """Returns a parameter as user code reads it: a HetTensor if it is sharded."""
        own, of = self._parameters.get(name), self.held.get(name)
        if own is None or of is None or of.is_replicated:
            return own
        rank = self.group.rank
        owned = local_slice(
            synced_grad(self.group, own, of), of.boxes[rank], of.primary.boxes[rank]
        )
        return HetTensor.wrap(owned, of.primary, self.group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Registers a copy of the module."""
        super().__setstate__(state)
        _sharded.add(self)

    @abstractmethod
    def _plain(self) -> nn.Module:
        """Returns a plain module like this one, with parameters on the meta device."""

    @torch.no_grad()
    def load_full(self, full: Mapping[str, Tensor]) -> None:
        """Loads this rank's slices of whole parameters; local.

        Args:
            full: The whole parameters by name.
        """
        for name, of in self.held.items():
            self.parameter_slice(name).copy_(
                full[name][of.boxes[self.group.rank].slices_in(Box.whole(of.shape))]
            )

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Applies a function to the plain layer with the whole parameters; collective.

        Parameters that it writes to are sharded again, with rank 0's values. Attributes,
        hooks, the mode and ``requires_grad`` become the module's too.

        Args:
            fn: The function, as in `torch.nn.Module.apply`.

        Raises:
            HetConvError: On every rank, if ``fn`` raised an error on one, or changed the
                names or shapes of parameters.
        """
        assert_consensus(self.group, f"apply to a {type(self).__name__}", repr(self))
        plain = self._whole()
        attributes, before = dict(vars(plain)), _versions(plain)

        def written() -> list[str]:
            fn(plain)
            shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
            if (wanted := {name: of.shape for name, of in self.held.items()}) != shapes:
                raise HetConvError(
                    f"apply gave a layer the parameters {shapes}, where {wanted} were expected"
                )
            return [
                name for name, now in _versions(plain).items() if now != before[name]
            ]

        changed = validate_together(self.group, "apply", written, str)
        own = dict(plain.named_parameters())
        if changed:
            broadcast(self.group, [own[name].data for name in changed])
            self.load_full({name: p.detach() for name, p in own.items()})
        for name, p in own.items():
            self.parameter_slice(name).requires_grad_(p.requires_grad)
        self.training = plain.training
        for name, value in vars(plain).items():
            if name not in MODULE_ATTRIBUTES and (
                name not in attributes or attributes[name] is not value
            ):
                setattr(self, name, value)
        return self

    def reset_parameters(self) -> None:
        """Draws new parameters as the plain layer does; collective."""
        self.apply(lambda plain: plain.reset_parameters())  # type: ignore[operator]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter; refuses those that normalize or prune a sharded one."""
        if self._is_parametrization(name):
            self._refuse_parametrization(name)
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if name in vars(self).get("held", {}):
            self._refuse_parametrization(name)
        super().__delattr__(name)

    def _is_parametrization(self, name: str) -> bool:
        """Returns whether weight norm or pruning uses this name, such as ``weight_g``."""
        return any(name.startswith(f"{held}_") for held in vars(self).get("held", {}))

    def _refuse_parametrization(self, name: str) -> None:
        raise HetConvError(
            f"a {type(self).__name__} holds this rank's slice of its parameters, which cannot "
            "be parametrized, "
            f"normalized or pruned ({name}); do that to the plain layer, before "
            "hetconv.parallelize, and leave it out "
            f"of the plan"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Loads this rank's slices, also from the whole tensors of a plain model's state."""
        for name, of in self.held.items():
            given, box = state_dict.get(prefix + name), of.boxes[self.group.rank]
            if (
                isinstance(given, Tensor)
                and tuple(given.shape) == of.shape != box.shape
            ):
                state_dict[prefix + name] = local_slice(
                    given, Box.whole(of.shape), box
                ).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _whole(self) -> nn.Module:
        """Returns the plain module with the current values and hooks; collective."""
        plain, rank = self._plain(), self.group.rank
        for name, of in self.held.items():
            own = self.parameter_slice(name)
            owned = local_slice(own.detach(), of.boxes[rank], of.primary.boxes[rank])
            whole = (
                own
                if of.is_replicated
                else gather(HetTensor.made(owned, of.primary, self.group))
            )
            plain.register_parameter(
                name,
                nn.Parameter(whole.detach().clone(), requires_grad=own.requires_grad),
            )
        for name, value in vars(self).items():
            if name in MODULE_ATTRIBUTES and "hooks" in name:
                plain.__dict__[name] = value
        return plain.train(self.training)


_sharded: WeakSet[ShardedModule] = WeakSet()
_WHOLE_TENSOR_OPTIMIZERS = tuple(
    kind
    for name in ("LBFGS", "Adafactor", "Muon")
    if (kind := getattr(torch.optim, name, None)) is not None
)
"""Optimizers that compute the step of an element from other elements."""


def _slice_in(params: Iterable[Tensor]) -> str | None:
    """Describes the first of some parameters that is a slice; None if there is none."""
    own = {id(p) for p in params}
    for module in _sharded:
        for name, of in module.held.items():
            if not of.is_replicated and id(module._parameters.get(name)) in own:
                kind = type(module).__name__
                return (
                    f"was given the {name} of a {kind}({module.extra_repr()}), of which "
                    "each rank holds a slice"
                )
    return None


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (
        isinstance(optimizer, _WHOLE_TENSOR_OPTIMIZERS)
        and (description := _slice_in(_params_of(optimizer))) is not None
    ):
        raise HetConvError(
            f"{type(optimizer).__name__} goes by whole tensors, but {description}; use an "
            "optimizer that computes each number by itself, such as SGD, Adam or AdamW, or "
            "split the layer by sample or height, with a share for every rank"
        )


def _check_clipping(params: list[Tensor]) -> None:
    if (description := _slice_in(params)) is not None:
        raise HetConvError(
            f"torch.nn.utils.clip_grad_norm_ {description}, so that ranks would clip by norms of "
            "their own; call "
            f"hetconv.clip_grad_norm_(model, max_norm) instead"
        )


def _check_unscaling(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    if (
        not getattr(scaler, "asks_all_ranks", False)
        and (description := _slice_in(_params_of(optimizer))) is not None
    ):
        raise HetConvError(
            f"torch.amp.GradScaler {description}, so that one rank would skip a step that others "
            "take; use "
            f"hetconv.GradScaler(model) instead"
        )


register_patch(lambda: register_optimizer_step_pre_hook(_check_step).remove)


def _check_replicating(model: nn.Module, replicas: set[int]) -> None:
    for module in model.modules():
        if not isinstance(module, ShardedModule):
            continue
        split = dist.get_process_group_ranks(module.group.process_group)
        if len(replicas.intersection(split)) > 1:
            raise HetConvError(
                f"DistributedDataParallel would copy and average over ranks {sorted(replicas)} "
                f"what ranks {split} of a split model hold slices of; leave it out, because a "
                "split model sums its gradients itself, or give it as process_group the ranks "
                "of replicas, one of each split model. If a library wraps models: "
                "hetconv.integrations has modules for accelerate, Fabric and transformers"
            )


register_patch(lambda: check_before_clipping(_check_clipping))
register_patch(lambda: check_before_unscaling(_check_unscaling))
register_patch(lambda: check_before_replicating(_check_replicating))


def _versions(module: nn.Module) -> Versions:
    return {name: (id(p), write_count(p)) for name, p in module.named_parameters()}
