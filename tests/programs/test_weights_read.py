"""A weight that is read beside its layer's own call: by penalties, tied decoders, and
losses inside forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetconv
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import Differences, apart, assert_same, full_gradients
from tests.nets import plan_of
from tests.spawn import on_ranks

Read = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """An encoder and a second layer, and something that is read of their weights."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.e, self.f = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Conv2d(8, 6, 3, padding=1, bias=False),
        )
        self.g = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.head = nn.Linear(6, 4)
        self.read = read

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.f(torch.relu(self.e(x))))
        return self.head(self.g(y).mean((2, 3))), self.read(self, y)


def orthogonality(net: Net, y: Tensor) -> Tensor:
    w = net.f.weight.flatten(1)
    return (w @ w.t() - torch.eye(6, dtype=w.dtype)).square().sum()


def tied_decoder(net: Net, y: Tensor) -> Tensor:
    return F.conv_transpose2d(y, net.f.weight, padding=1).square().mean()


def weight_of_another(net: Net, y: Tensor) -> Tensor:
    return F.conv2d(y, net.f.weight.transpose(0, 1), padding=1).square().mean()


def largest_singular_value(net: Net, y: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(net.e.weight.flatten(1), 2)


def norms_of_all(net: Net, y: Tensor) -> Tensor:
    return sum(
        (torch.linalg.norm(p) for p in net.parameters()), torch.zeros((), dtype=y.dtype)
    )


def named_without_biases(net: Net, y: Tensor) -> Tensor:
    decayed = [
        p.square().sum()
        for name, p in net.named_parameters()
        if name.endswith("weight")
    ]
    return torch.stack(decayed).sum()


def bias_and_linear(net: Net, y: Tensor) -> Tensor:
    assert net.e.bias is not None
    return (
        net.e.bias.abs().sum() + net.head.weight.std() + net.g.weight.square().mean()
    ) * y.mean()


def standardized(net: Net, y: Tensor) -> Tensor:
    w = net.g.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
    return F.conv2d(y, w, net.g.bias, padding=1, groups=2).square().mean()


def its_shape_and_dtype(net: Net, y: Tensor) -> Tensor:
    w = net.f.weight
    assert (w.shape, w.size(0), w.numel(), w.requires_grad) == (
        (6, 8, 3, 3),
        6,
        432,
        True,
    )
    return y.to(w.dtype).type_as(w).mean() * w.shape[0]


def computed_again(net: Net, y: Tensor) -> Tensor:
    region: Tensor = checkpoint(
        lambda z: weight_of_another(net, z) + orthogonality(net, z),
        y,
        use_reentrant=False,
    )
    return region


READS: tuple[Read, ...] = (
    orthogonality,
    tied_decoder,
    weight_of_another,
    largest_singular_value,
    norms_of_all,
    named_without_biases,
    bias_and_linear,
    standardized,
    its_shape_and_dtype,
    computed_again,
)


def splits_by(kind: SplitKind, sizes: tuple[int, ...]) -> dict[str, Split]:
    names = ("e", "f", "g", "head") if kind in ("filter", "sample") else ("e", "f", "g")
    if kind == "channel":
        names = ("f", "head")
    return {name: Split(kind, sizes) for name in names}


def cut_of(net: Net, kind: SplitKind, sizes: tuple[int, ...]) -> nn.Module:
    splits = {
        name: Split(
            kind,
            sizes
            if kind not in ("filter", "channel")
            else shares(net.get_submodule(name), kind, sizes),
        )
        for name in splits_by(kind, sizes)
    }
    return hetconv.parallelize(copy.deepcopy(net), plan_of(net, splits, len(sizes)))


def shares(
    layer: nn.Module, kind: SplitKind, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Whole groups of the layer's filters or channels, about as these sizes."""
    extent = layer.weight.shape[0 if kind == "filter" else 1]
    groups = getattr(layer, "groups", 1)
    assert isinstance(extent, int)
    return tuple(n * groups for n in hetconv.apportion(extent // groups, sizes))


def differences(kind: SplitKind, sizes: tuple[int, ...], twice: bool) -> Differences:
    torch.set_default_dtype(torch.float64)
    found: Differences = {}
    for read in READS:
        torch.manual_seed(0)
        plain = Net(read)
        cut = cut_of(plain, kind, sizes)
        x = torch.randn(3, 4, 8, 7)
        for model in (plain, cut):
            model.losses = []
            for _ in range(1 + twice):  # two forwards, one backward
                y, told = model(x)
                assert type(told) is Tensor
                model.losses.append(y.square().mean() + told)
            sum(model.losses).backward()
        gradients = full_gradients(cut)
        found[f"loss, {read.__name__}"] = apart(cut.losses[0], plain.losses[0])
        found |= {
            f"{k}, {read.__name__}": apart(gradients[k], p.grad)
            for k, p in plain.named_parameters()
        }
    return found


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("height", (5, 3)),
        ("filter", (5, 3)),
        ("channel", (5, 3)),
        ("sample", (2, 1)),
        ("height", (8, 0)),
        ("sample", (0, 3)),
        ("filter", (4, 0, 2)),
        ("height", (5, 0, 3)),
    ],
)
def test_a_weight_is_read_whole_and_so_is_its_gradient(
    kind: SplitKind, sizes: tuple[int, ...], twice: bool
) -> None:
    assert_same(on_ranks(len(sizes), differences, kind, sizes, twice))


def twice_differentiated(kind: SplitKind, sizes: tuple[int, ...]) -> Differences:
    """The gradient of a gradient's norm, where the weight is in the loss too."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = Net(orthogonality)
    cut = cut_of(plain, kind, sizes)
    x = torch.randn(3, 4, 8, 7)
    for model in (plain, cut):
        z = x.clone().requires_grad_()
        y, told = model(z)
        (g,) = torch.autograd.grad((y.square().mean() * told), z, create_graph=True)
        g.square().sum().backward()
    gradients = full_gradients(cut)
    return {k: apart(gradients[k], p.grad) for k, p in plain.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "sizes"), [("height", (5, 3)), ("filter", (5, 3)), ("channel", (5, 3))]
)
def test_with_create_graph(kind: SplitKind, sizes: tuple[int, ...]) -> None:
    assert_same(on_ranks(2, twice_differentiated, kind, sizes))


def outside(kind: SplitKind, sizes: tuple[int, ...]) -> Differences:
    """A penalty in the training loop, and that the optimizer still has slices."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = Net(its_shape_and_dtype)
    cut = cut_of(plain, kind, sizes)
    x = torch.randn(3, 4, 8, 7)
    expected = (
        plain(x)[0].square().mean() + orthogonality(plain, x) + norms_of_all(plain, x)
    )
    expected.backward()
    penalties = [
        hetconv.call_with_whole_weights(cut, read, cut, x)
        for read in (orthogonality, norms_of_all)
    ]
    loss = cut(x)[0].square().mean() + sum(penalties)
    loss.backward()
    assert all(isinstance(p, nn.Parameter) for p in cut.parameters())
    assert isinstance(cut.f.weight, nn.Parameter)
    gradients = full_gradients(cut)
    found = {k: apart(gradients[k], p.grad) for k, p in plain.named_parameters()}
    return found | {"loss": apart(loss, expected)}


@pytest.mark.parametrize(
    ("kind", "sizes"), [("height", (5, 3)), ("filter", (5, 3)), ("channel", (5, 3))]
)
def test_outside_of_the_forward_by_a_call_of_its_own(
    kind: SplitKind, sizes: tuple[int, ...]
) -> None:
    assert_same(on_ranks(2, outside, kind, sizes))


def test_of_a_plain_model_is_refused() -> None:
    with pytest.raises(hetconv.HetConvError, match="no split layer; call hetconv"):
        hetconv.call_with_whole_weights(nn.Conv2d(1, 1, 1), float)


def test_such_models_are_captured() -> None:
    for read in READS:
        graph = hetconv.capture(Net(read), torch.randn(3, 4, 8, 7))
        assert {"e", "f", "g", "head"} <= set(graph.layers), read.__name__
