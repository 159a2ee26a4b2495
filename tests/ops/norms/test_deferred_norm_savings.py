"""What a deferred norm saves: launches of kernels and rounds of messages."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hetconv.comm.exchange import PendingExchange
from hetconv.kernels.launch import Launch
from hetconv.kernels.norms import passes
from hetconv.ops.norms.normalized_region import NormalizedRegion
from hetconv.runtime.het_tensor import HetTensor
from tests.equivalence import (
    Differences,
    apart,
    one_step,
    pair,
)
from tests.nets import splits_of
from tests.ops.norms.test_deferred_norm import FUNCTIONS, SHAPE, Chain, scaled
from tests.spawn import on_ranks


def norms_by_triton(name: str) -> tuple[Differences, list[str]]:
    """A step and an inference, and the activations that are computed with a norm."""

    def make() -> nn.Module:
        chain = Chain()
        chain.function = FUNCTIONS[name]  # type: ignore[method-assign]
        return chain

    splits = splits_of(make(), ("height",), (2, 1))
    serial, cut = pair(make, splits, 2, dtype=torch.float32)
    x = torch.randn(SHAPE, dtype=torch.float32)
    fused: list[str] = []
    run = Launch.run

    def recorded(launch: Launch, tensors: Any) -> None:
        if launch.kernel.fn.__name__ == "normalize":
            fused.append(launch.constants["ACTIVATION"])
        run(launch, tensors)

    with patch.object(passes, "prefers_triton", lambda x: True):
        found = one_step(serial, cut, x, by=scaled)
        with torch.no_grad(), patch.object(Launch, "run", recorded):
            found["inference"] = scaled(cut(x), serial(x))
    return found, fused


@pytest.mark.parametrize(
    ("name", "activation"), [("leaky relu", "leaky_relu"), ("two", "relu"), ("elu", "")]
)
def test_triton_computes_an_activation_with_the_norm(
    name: str, activation: str
) -> None:
    """In inference; in training, norms and their gradients alone."""
    for differences, fused in on_ranks(2, norms_by_triton, name):
        assert max(differences.values()) < 1e-4, differences
        assert set(fused) == {activation}


def rounds_of_a_step(training: bool) -> tuple[int, int, int]:
    """Returns how often messages are exchanged forward and backward, and regions made."""
    _, cut = pair(Chain, splits_of(Chain(), ("height",), (1, 1)), 2)
    counts = {"rounds": 0, "regions": 0}
    begin, fill = PendingExchange._begin, NormalizedRegion.forward

    def begun(*args: Any) -> None:
        counts["rounds"] += 1
        begin(*args)

    def filled(*args: Any) -> Tensor:
        counts["regions"] += 1
        found: Tensor = fill(*args)
        return found

    x = torch.randn(SHAPE, requires_grad=training)
    with (
        patch.object(PendingExchange, "_begin", begun),
        patch.object(NormalizedRegion, "forward", staticmethod(filled)),
        torch.set_grad_enabled(training),
    ):
        y = cut(x)
        forward = counts["rounds"]
        if training:
            y.sum().backward()
    return forward, counts["rounds"] - forward, counts["regions"]


def test_one_round_serves_norm_and_convolution() -> None:
    """The first convolution reads a whole image; two more rounds gather the result, or sum
    gradients of parameters and of the image.
    """
    ((inference, _, _),) = {*on_ranks(2, rounds_of_a_step, False)}
    assert inference == 3  # two layers, and the result
    ((forward, backward, regions),) = {*on_ranks(2, rounds_of_a_step, True)}
    assert (forward, regions) == (3, 2)
    assert backward == 4  # two layers, parameters, and the image


def held_beside_the_buffer() -> tuple[bool, float]:
    """Returns whether a norm's input outlives the convolution, and an error of the norm."""
    serial, cut = pair(Chain, splits_of(Chain(), ("height",), (1, 1)), 2)
    x = torch.randn(SHAPE)
    inputs: list[weakref.ref[Tensor]] = []
    found: list[tuple[bool, float]] = []

    def note(_: Any, given: tuple[HetTensor], __: Any) -> None:
        inputs.append(weakref.ref(given[0].local))

    def compare(_: Any, given: tuple[HetTensor], __: Any) -> None:
        is_held = inputs[0]() is not None
        found.append((is_held, apart(given[0].whole(), expected)))

    cut.norm.register_forward_hook(note)
    cut.second.register_forward_hook(compare)
    with torch.no_grad():
        expected = serial.function(serial.norm(serial.first(x)))
        cut(x)
    return found[0]


def test_the_input_of_a_norm_is_freed_before_the_convolution_computes() -> None:
    for is_held, error in on_ranks(2, held_beside_the_buffer):
        assert not is_held
        assert error < 1e-12
