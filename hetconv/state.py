"""The state of a split model in the keys and shapes of the whole one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .agreement import checksum, prepared
from .errors import HetConvError
from .layout import Layout
from .modules import CutLayer
from .movement import moved


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the whole model with the original keys and shapes, on every rank; collective."""
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for key, (layer, name, layout) in _cut_parameters(model).items():
        local = getattr(layer, name).detach()
        state[key] = moved(layer.team, local, layout, Layout.replicated(layout.shape, layout.world)).clone()
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads what `full_state_dict`, or the unsplit model's ``state_dict``, gave; collective.

    Raises `HetConvError` on every rank, before anything changes, if keys or shapes do not fit on some rank, and
    `DisagreementError` if ranks were given different values.
    """
    cut = _cut_parameters(model)
    own = model.state_dict()
    shapes = {k: cut[k][2].shape if k in cut else tuple(v.shape) for k, v in own.items()}
    teams = {layer.team for layer in model.modules() if isinstance(layer, CutLayer)}
    for team in teams:
        prepared(team, "load_full_state_dict", lambda: _check(state, shapes), lambda sums: f"a state of bytes {sums}")
    if not teams:
        _check(state, shapes)
    with torch.no_grad():
        for key, value in own.items():
            if key in cut:
                layer, name, layout = cut[key]
                box = layout.boxes[layer.team.rank]
                getattr(layer, name).copy_(state[key][tuple(map(slice, box.lo, box.hi))])
            else:
                value.copy_(state[key])


def _check(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What the ranks compare of a state that fits."""
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    wrong = {k: tuple(state[k].shape) for k in shapes.keys() & state.keys() if tuple(state[k].shape) != shapes[k]}
    if missing or unknown or wrong:
        raise HetConvError(
            f"the state does not fit the model: missing {missing}, unknown {unknown}, "
            f"of another shape {[f'{k}: {s}, expected {shapes[k]}' for k, s in sorted(wrong.items())]}"
        )
    return sum(checksum(state[k]) * (i + 1) for i, k in enumerate(sorted(shapes)))


def _cut_parameters(model: nn.Module) -> dict[str, tuple[CutLayer, str, Layout]]:
    """Layer, name there and layout of every parameter that is cut among ranks, by its key in the state."""
    return {
        f"{path}.{name}" if path else name: (layer, name, layout)
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, CutLayer)
        for name, layout in layer.cut_parameters().items()
    }
