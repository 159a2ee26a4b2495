"""What programs do to the layers of a parallelized model is done to whole layers, or
refused on all ranks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import hetconv
from tests.equivalence import Differences, apart, assert_same, same_state
from tests.spawn import on_ranks

from .table import PLACES, Net, Run, Table

PROGRAMS = Table()


def trained(run: Run, model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.images()), run.labels())
        loss.backward()
        run.note("loss", loss)
        run.note_gradients(model)
        optimizer.step()
    run.note("evaluated", model.eval()(run.images()))


def initialized(module: nn.Module) -> None:
    """As model zoos have it: by the layer's class, with numbers that go by its fan."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        module.bias.data = torch.full_like(module.bias, 0.1)


@PROGRAMS.program
def initialized_after(run: Run) -> None:
    model = run.parallel(Net())
    model.apply(initialized)
    run.note("drawn alike", torch.rand(2))
    trained(run, model)


@PROGRAMS.program
def reset(run: Run) -> None:
    model = run.parallel(Net())
    model.to_empty(device=torch.get_default_device())
    model.apply(
        lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None
    )
    trained(run, model)
    model.train().head.reset_parameters()
    trained(run, model)


@PROGRAMS.program
def attributes_set_by_a_function(run: Run) -> None:
    """Sets circular padding, frozen filters and hooks after a forward without them."""
    model, seen = run.parallel(Net()), list[Tensor]()
    run.note("before", model(run.images()))

    def change(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
            module.weight.requires_grad_(False)
            module.register_forward_hook(lambda _, x, y: seen.append(hetconv.gather(y)))

    model.apply(change)
    trained(run, model)
    run.note("seen", seen)


@PROGRAMS.program
def the_state_of_a_plain_model(run: Run) -> None:
    """A pretrained backbone, loaded into a model with another head, and then a whole state."""
    pretrained, model = Net(classes=7), run.parallel(Net())
    backbone = {
        k: v for k, v in pretrained.state_dict().items() if not k.startswith("head")
    }
    missing = model.load_state_dict(backbone, strict=False).missing_keys
    assert set(missing) == {"head.weight", "head.bias"}
    trained(run, model)
    model.train().load_state_dict(Net().state_dict())
    trained(run, model)
    model.train().load_state_dict(Net().state_dict(), assign=True)
    model.requires_grad_(True)
    trained(run, model)


class LoRA(nn.Module):
    """A frozen convolution and two that learn beside it, as peft wraps them."""

    def __init__(self, base: nn.Conv2d, rank: int = 2, alpha: float = 4.0):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Conv2d(
            base.in_channels,
            rank,
            base.kernel_size,
            base.stride,
            base.padding,
            bias=False,
        )
        self.lora_B = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        self.scaling, self.merged = alpha / rank, False
        nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y if self.merged else y + self.lora_B(self.lora_A(x)) * self.scaling

    def merge(self) -> None:
        a, b = self.lora_A.weight, self.lora_B.weight
        self.base_layer.weight.data += (
            F.conv2d(a.permute(1, 0, 2, 3), b).permute(1, 0, 2, 3) * self.scaling
        )
        self.merged = True


def adapted(model: nn.Module) -> nn.Module:
    for i in (0, 3):
        model.features[i] = LoRA(model.features[i])
    return model


@PROGRAMS.program
def low_rank_adapters(run: Run) -> None:
    """Wrapped before the model is parallelized; merged in the plain model, which takes
    the state back.
    """
    plain = adapted(Net())
    model = run.parallel(copy.deepcopy(plain))
    trained(run, model, steps=3)
    plain.load_state_dict(hetconv.full_state_dict(model))
    x = run.images(2)
    run.note("adapted", model(x))
    for i in (0, 3):
        plain.features[i].merge()
    run.note("merged", run.parallel(plain.eval(), "merged")(x))


@PROGRAMS.program
def adapters_around_cut_layers(run: Run) -> None:
    """Wrapped after the model was parallelized, around some of its layers; the small
    convolutions are not cut.
    """
    model = run.parallel(Net().requires_grad_(False))

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.beside = model, nn.Conv2d(3, 8, 5, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.whole.head(
                (self.whole.features(x) + self.beside(x)).mean((2, 3))
            )

    trained(run, Adapted())


@PROGRAMS.program
def a_layer_replaced_and_one_added(run: Run) -> None:
    model = run.parallel(Net())
    model.features[3] = nn.Conv2d(6, 8, 1)
    model.features.append(nn.Conv2d(8, 8, 3))
    trained(run, model)


NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.3),
}


def _normed(how: str) -> None:
    def program(run: Run) -> None:
        model = Net()
        NORMED[how](model.features[3])
        trained(run, run.parallel(model))

    program.__name__ = program.__qualname__ = how.replace(" ", "_") + "_before"
    globals()[program.__name__] = PROGRAMS.program(program)


for _how in NORMED:
    _normed(_how)


@PROGRAMS.program
def other_dtypes(run: Run) -> None:
    """Converted after it was parallelized, parts and all; one step in each dtype, and back."""
    model = run.parallel(Net())
    for convert in (
        nn.Module.float,
        nn.Module.double,
        lambda m: m.to(torch.float32),
        lambda m: m.to(torch.float64),
    ):
        convert(model)
        dtype = next(model.parameters()).dtype
        assert {
            p.dtype
            for p in (*model.parameters(), *model.buffers())
            if p.is_floating_point()
        } == {dtype}
        y = model.train(dtype == torch.float64)(run.images().to(dtype))
        assert y.dtype == dtype
        if dtype == torch.float64:
            run.note("result", y)
            y.square().mean().backward()
            run.note_gradients(model)
            model.zero_grad()


test_programs = PROGRAMS.test()


def halved(place: str, dtype: torch.dtype) -> list[float]:
    """How far the results of a converted model, and of the plain one, are from those in float64."""
    torch.set_default_dtype(torch.float64)
    plain = Net()
    x = torch.randn(3, 3, 9, 7)
    truth = plain(x)
    model = Run(place).parallel(copy.deepcopy(plain))
    converted = [m.to(dtype) for m in (model, plain)]
    assert all(p.dtype == dtype for p in model.parameters())
    results = [m(x.to(dtype)) for m in converted]
    results[0].square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    assert all(y.dtype == dtype for y in results)
    return [float((y.double() - truth).abs().max()) for y in results]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_model_converted_to_half_precision(place: str, dtype: torch.dtype) -> None:
    for mine, theirs in on_ranks(2, halved, place, dtype):
        assert mine <= 4 * theirs + 1e-3


def refused(how: str, place: str) -> str:
    """What is said of a cut layer that is changed so; the model is as it was, unless
    the change deleted a weight.
    """
    model, x = Run(place).parallel(Net().eval()), torch.randn(3, 3, 9, 7)
    before = model(x)
    calls: dict[str, Callable[[nn.Module], Any]] = {
        **NORMED,
        "raises on one rank": lambda m: m.apply(_raise_on_one),
        "other parameters": lambda m: m.apply(
            lambda plain: setattr(plain, "weight", nn.Parameter(torch.zeros(2, 2)))
        ),
    }
    with pytest.raises(hetconv.HetConvError) as e:
        calls[how](model.features[3])
    if how == "old weight_norm":
        with pytest.raises(hetconv.HetConvError, match="has the shape None"):
            model(x)
    else:
        y = model(x)
        assert (
            torch.equal(y, before) or how == "orthogonal"
        )  # which writes to a weight before it asks for its place
    return str(e.value)


def _raise_on_one(module: nn.Module) -> None:
    if torch.distributed.get_rank():
        raise ValueError("no such layer")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        *(
            (how, "HetConv2d holds this rank's slice.*leave it out of the plan")
            for how in NORMED
        ),
        ("raises on one rank", "rank 1: ValueError: no such layer"),
        ("other parameters", r"\(2, 2\).*expected"),
    ],
)
@pytest.mark.parametrize("place", ["height", "filter", "channel"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_would_see_slices_is_refused(how: str, said: str, place: str) -> None:
    assert all(re.search(said, message) for message in on_ranks(2, refused, how, place))


def given_whole(place: str, names: tuple[str, ...], alone: bool) -> str:
    """Returns the error of `functional_call` with whole tensors, of a model or a layer."""
    torch.set_default_dtype(torch.float64)
    plain = Net()
    model = Run(place).parallel(copy.deepcopy(plain))
    whole = {name: p for name, p in plain.named_parameters() if name in names}
    if alone:
        plain = nn.Sequential(nn.Conv2d(3, 6, 3))
        kind, sizes = PLACES[place]
        if kind == "filter":
            sizes = (4, 2) if all(sizes) else (6, 0)
        split = hetconv.Split(kind, sizes)
        model = nn.Sequential(hetconv.HetConv2d.from_conv(plain[0], split))
        whole = dict(plain.named_parameters())
    x = torch.randn(3, 3, 9, 7)
    with pytest.raises(hetconv.HetConvError) as e:
        functional_call(model, whole, (x,))
    assert apart(model.eval()(x), plain.eval()(x)) <= 1e-12
    return str(e.value)


@pytest.mark.parametrize(
    "place", ["filter", "channel", "height on one", "filter on one"]
)
@pytest.mark.parametrize(
    "names", [("features.0.weight",), ("head.weight", "head.bias"), ()], ids=str
)
def test_whole_tensors_in_the_place_of_slices_are_refused_on_all_ranks(
    names: tuple[str, ...], place: str
) -> None:
    if place == "height on one" and "head.weight" in names:
        place = "channel"  # a linear layer has no height
    for said in on_ranks(2, given_whole, place, names, not names):
        shapes = "has the shape .*, but this rank holds .* of "
        assert re.search(rf"rank [01].*of a Het.*{shapes}", said)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], 0.01),
}
"""That go by whole tensors."""


def by_whole_tensors(
    how: str, place: str, with_linear: bool, copied: bool
) -> Differences:
    """How far steps of a model, or of a copy of it, are from those on one device."""
    torch.set_default_dtype(torch.float64)
    layers = [nn.Flatten(), nn.Linear(140, 6)] if with_linear else [nn.Conv2d(4, 2, 3)]
    serial = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *layers)
    cut = Run(place).parallel(copy.deepcopy(serial))
    models, x = (copy.deepcopy(cut) if copied else cut, serial), torch.randn(2, 3, 9, 7)
    for model in models:
        optimizer = OPTIMIZERS[how](list(model.parameters()))

        def closure(
            model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    return same_state(models[1], models[0])


def said_of_slices(how: str, place: str, copied: bool) -> str:
    with pytest.raises(hetconv.HetConvError) as e:
        by_whole_tensors(how, place, True, copied)
    return str(e.value)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("how", ["LBFGS", "Adafactor"])
def test_an_optimizer_may_go_by_tensors_that_every_rank_holds_whole(
    how: str, copied: bool
) -> None:
    assert_same(on_ranks(2, by_whole_tensors, how, "height", False, copied))


@pytest.mark.parametrize("place", ["filter", "channel", "height on one"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_an_optimizer_that_would_take_slices_for_tensors_is_refused(
    how: str, copied: bool, place: str
) -> None:
    for said in on_ranks(2, said_of_slices, how, place, copied):
        assert re.search(rf"{how} goes by whole tensors.*of a Het.*SGD", said)
