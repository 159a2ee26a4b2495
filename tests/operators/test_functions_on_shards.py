"""Operators with and without a rule on shards in every placement, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetconv.operators import READERS, einsum, random, reductions, shapes, views
from hetconv.operators.base import N_ARY
from hetconv.operators.elementwise import UNARY
from tests.equivalence import Differences
from tests.placed import PLACEMENTS, WORLD, Fn, check, on_parts
from tests.spawn import on_ranks

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "clamp": (0.7, 1.2),
    "clamp_max": (1.1,),
    "clamp_min": (0.8,),
    "clip": (None, 1.1),
    "threshold": (1.0, 0.1),
    "to": (torch.float32,),
}
DOMAINS: dict[str, Fn] = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv", "logit"), lambda x: x / 2),
    **dict.fromkeys(("bitwise_not", "logical_not"), lambda x: x > 1),
    "acosh": lambda x: x + 1,
    "bool": lambda x: x.relu() - 1,
    "invert": lambda x: (x * 10).long(),
}
"""Arguments in the domain of functions that are not defined between 0.5 and 1.5."""


def unary(name: str) -> Fn:
    owner = next(
        (o for o in (F, Tensor, torch, torch._C._nn) if hasattr(o, name)), Tensor
    )
    function, domain = (
        getattr(owner, name, None) or getattr(Tensor, f"__{name}__"),
        DOMAINS.get(name, lambda x: x),
    )
    return lambda x, z, p: function(domain(x), *ARGUMENTS.get(name, ()))


def join(name: str) -> Fn:
    if name in ("and", "or", "xor", "mod", "floordiv", "rfloordiv"):
        return lambda x, z, p: getattr(Tensor, f"__{name}__")(
            (x * 10).long(), (z * 4).long()
        )
    if name.startswith("bitwise"):
        return lambda x, z, p: getattr(torch, name)(x > 1, z > 1)
    if name == "floor_divide":
        return lambda x, z, p: torch.floor_divide(x.detach(), z.detach())
    if name == "masked_fill":
        return lambda x, z, p: x.masked_fill(z > 1, 0.3)
    if name == "type_as":
        return lambda x, z, p: x.float().type_as(z)
    if name == "where":
        return lambda x, z, p: torch.where(p["full"] > 1, x, z)
    if name == "rsub":
        return lambda x, z, p: torch.rsub(x, z, alpha=2)
    if name in ("lerp", "addcmul", "addcdiv"):
        return lambda x, z, p: getattr(torch, name)(x, z, p["c11"])
    if name in ("rdiv", "rpow"):
        return lambda x, z, p: getattr(Tensor, f"__{name}__")(x, z)
    return lambda x, z, p: getattr(torch, name)(x, z)


def wrote(x: Tensor, change: Any) -> Tensor:
    """Returns a copy of ``x`` after a change in place."""
    y = x * 1
    result = change(y)
    return y if result is None else y + 0 * result.sum()


FUNCTIONS: dict[str, Fn] = {name: unary(name) for name in sorted(UNARY)} | {
    name: join(name) for name in sorted(N_ARY)
}
FUNCTIONS |= {
    "x + number": lambda x, z, p: x + 2,
    "number - x": lambda x, z, p: 3 - x,
    "number / x": lambda x, z, p: 3 / x,
    "x ** 2": lambda x, z, p: x**2,
    "2 ** x": lambda x, z, p: 2**x,
    "-x": lambda x, z, p: -x,
    "x - x": lambda x, z, p: x - x * 0.5,
    "x * tensor of one number": lambda x, z, p: x * p["one"],
    "tensor of one number * x": lambda x, z, p: p["one"] * x,
    "x + full": lambda x, z, p: x + p["full"],
    "full - x": lambda x, z, p: p["full"] - x,
    "x * nc11": lambda x, z, p: x * p["nc11"],
    "x * 1c11": lambda x, z, p: x * p["1c11"],
    "x * c11": lambda x, z, p: x * p["c11"],
    "c11 * x": lambda x, z, p: p["c11"] * x,
    "x / n111": lambda x, z, p: x / p["n111"],
    "x + hw": lambda x, z, p: x + p["hw"],
    "x + h1": lambda x, z, p: x + p["h1"],
    "x + w": lambda x, z, p: x + p["w"],
    "x * 1111": lambda x, z, p: x * p["1111"],
    "x * more dimensions": lambda x, z, p: x * p["more"],
    "x + alpha z": lambda x, z, p: torch.add(x, z, alpha=3),
    "x, keyword": lambda x, z, p: torch.mul(input=x, other=z),
    "clamp by keyword": lambda x, z, p: x.clamp(max=1.0),
    "lerp by number": lambda x, z, p: torch.lerp(x, z, 0.3),
    "where number": lambda x, z, p: torch.where(p["full"] > 1, x, 0.0),
    "squeeze and excite": lambda x, z, p: (
        x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1))
    ),
    "pooled * z": lambda x, z, p: F.adaptive_avg_pool2d(x, 1) * z,
    "max_pool2d 2": lambda x, z, p: F.max_pool2d(x, 2),
    "max_pool2d 3, 2, 1": lambda x, z, p: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d dilated": lambda x, z, p: F.max_pool2d(x, 2, 1, 0, 2),
    "max_pool2d of negatives": lambda x, z, p: F.max_pool2d(-x, 3, 1, 1),
    "max_pool2d (3, 1)": lambda x, z, p: F.max_pool2d(
        x, (3, 1), stride=(2, 1), padding=(1, 0)
    ),
    "max_pool2d ceil": lambda x, z, p: F.max_pool2d(x, 2, ceil_mode=True),
    "max_pool2d with indices": lambda x, z, p: F.max_pool2d(x, 2, return_indices=True),
    "max_pool2d larger than a share": lambda x, z, p: F.max_pool2d(x, 5, 1, 2),
    "avg_pool2d 2": lambda x, z, p: F.avg_pool2d(x, 2),
    "avg_pool2d 3, 2, 1": lambda x, z, p: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d without padding counted": lambda x, z, p: F.avg_pool2d(
        x, 3, 2, 1, count_include_pad=False
    ),
    "avg_pool2d (2, 3)": lambda x, z, p: F.avg_pool2d(
        x, (2, 3), 1, (1, 1), count_include_pad=False
    ),
    "avg_pool2d ceil": lambda x, z, p: F.avg_pool2d(x, 2, ceil_mode=True),
    "avg_pool2d divisor": lambda x, z, p: F.avg_pool2d(x, 2, divisor_override=3),
    "adaptive_avg_pool2d 1": lambda x, z, p: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool2d (1, 1)": lambda x, z, p: F.adaptive_avg_pool2d(x, (1, 1)),
    "adaptive_avg_pool2d (2, 3)": lambda x, z, p: F.adaptive_avg_pool2d(x, (2, 3)),
    "adaptive_avg_pool2d (None, 1)": lambda x, z, p: F.adaptive_avg_pool2d(
        x, (None, 1)
    ),
    "pixel_shuffle": lambda x, z, p: F.pixel_shuffle(x, 2),
    "pixel_shuffle by keyword": lambda x, z, p: torch.pixel_shuffle(
        input=x, upscale_factor=2
    ),
    "pixel_unshuffle": lambda x, z, p: F.pixel_unshuffle(x[..., :4], 2),
    "flatten": lambda x, z, p: torch.flatten(x, 1),
    "flatten all": lambda x, z, p: x.flatten(),
    "flatten middle": lambda x, z, p: x.flatten(1, 2),
    "flatten last": lambda x, z, p: x.flatten(-2),
    "flatten first": lambda x, z, p: x.flatten(0, 1),
    "flatten pooled": lambda x, z, p: torch.flatten(F.adaptive_avg_pool2d(x, 1), 1),
    "flatten nothing": lambda x, z, p: x.flatten(1, 1),
    "cat channels": lambda x, z, p: torch.cat([x, z, p["full"]], 1),
    "cat samples": lambda x, z, p: torch.cat([x, z]),
    "cat rows": lambda x, z, p: torch.cat((x, z), dim=-2),
    "cat columns": lambda x, z, p: torch.cat([z, x, z], 3),
    "cat plain first": lambda x, z, p: torch.cat([p["full"], x], 1),
    "cat unequal": lambda x, z, p: torch.cat(
        [x, F.adaptive_avg_pool2d(z, 1).expand(-1, -1, 6, 5)], 1
    ),
    "relu in place": lambda x, z, p: wrote(x, lambda y: F.relu(y - 1, inplace=True)),
    "relu_": lambda x, z, p: wrote(x, torch.relu_),
    "+=": lambda x, z, p: wrote(x, lambda y: y.__iadd__(z)),
    "-= number": lambda x, z, p: wrote(x, lambda y: y.__isub__(1)),
    "*= c11": lambda x, z, p: wrote(x, lambda y: y.__imul__(p["c11"])),
    "/= full": lambda x, z, p: wrote(x, lambda y: y.div_(p["full"])),
    "clamp_": lambda x, z, p: wrote(x, lambda y: y.clamp_(0.8, 1.1)),
    "setitem": lambda x, z, p: wrote(x, lambda y: y.__setitem__((slice(None), 1), 3.0)),
    "setitem from parts": lambda x, z, p: wrote(
        x, lambda y: y.__setitem__((slice(None), 1), z[:, 2])
    ),
    "fill_": lambda x, z, p: wrote(x, lambda y: y.fill_(0.5)) + x,
    "copy_": lambda x, z, p: wrote(x, lambda y: y.copy_(z)),
    "plain += x": lambda x, z, p: (p["full"] * 1).add_(x),
    "a view written to": lambda x, z, p: wrote(x, lambda y: y[:, :2].mul_(2)),
    "a view of a view written to": lambda x, z, p: wrote(
        x, lambda y: y.view(4, -1)[0].add_(1)
    ),
    "a transpose written to": lambda x, z, p: wrote(
        x, lambda y: y.transpose(1, 2).mul_(3)
    ),
    "a whole written to after its view": lambda x, z, p: (
        lambda y: (y[:, 0], y.mul_(2))[0]
    )(x * 1),
    "chunks": lambda x, z, p: torch.chunk(x, 2, 1),
    "split and join": lambda x, z, p: torch.cat(x.split([3, 5], 1)[::-1], 1),
    "mean": lambda x, z, p: x.mean((2, 3)),
    "sum": lambda x, z, p: x.sum(),
    "softmax": lambda x, z, p: torch.softmax(x, 1),
    "matmul": lambda x, z, p: x @ z.mT,
    "permute": lambda x, z, p: x.permute(0, 2, 3, 1),
    "reshape": lambda x, z, p: x.reshape(2, 2, 8, 30),
    "stack": lambda x, z, p: torch.stack([x, z]),
    "interpolate": lambda x, z, p: F.interpolate(x, scale_factor=2, mode="nearest"),
    "prelu": lambda x, z, p: F.prelu(-x, p["c"]),
    "pad": lambda x, z, p: F.pad(x, (1, 2, 0, 1)),
    "conv2d": lambda x, z, p: F.conv2d(x, p["full"][:, :, :3, :3], padding=1),
    "max": lambda x, z, p: x.amax(1),
    "comparison": lambda x, z, p: (x > z) & (x > 1),
    "comparison in place": lambda x, z, p: (lambda y: (y.__iand__(z > 1), y))(x > 0.8),
    "masked": lambda x, z, p: (
        x.masked_fill(x < 0.9, 0.0) + x.clone().masked_fill_(p["hw"] > 1, 2.0)
    ),
    "numbers": lambda x, z, p: (float(x.detach().mean()) * z, bool(x.sum() > 0) * z),
    "a number of one that is cut": lambda x, z, p: (
        float(x[:1, :1, :1, :1].reshape(1).detach()) * z
    ),
    "where it is true": lambda x, z, p: torch.where(x > 1)[0],
    "to another tensor's": lambda x, z, p: x.float().to(z),
    "index": lambda x, z, p: x[1:3, ..., 2],
    "loss": lambda x, z, p: F.mse_loss(x, z),
    "to the type of parts": lambda x, z, p: (
        p["c11"].float().type_as(x) * p["w"].half().to(z) * x
    ),
    "zeros_like": lambda x, z, p: torch.zeros_like(x, dtype=torch.float32) + z,
    "empty_like": lambda x, z, p: (
        torch.empty_like(x).copy_(z)
        + torch.full_like(x, 0.5) * torch.ones_like(input=z)
    ),
    "new_zeros": lambda x, z, p: (
        x.new_zeros(4, 1, 1, 5) + z.new_ones((6, 1)) * x.new_full((5,), 0.5)
    ),
    "new_empty": lambda x, z, p: x.new_empty((2, 3)).fill_(1.0),
    "dropout": lambda x, z, p: F.dropout(x, 0.5, False),
    "dropouts evaluating": lambda x, z, p: (
        nn.Dropout2d(0.3).eval()(F.alpha_dropout(x, 0.3)) + F.rrelu(-x)
    ),
}


def batch_norms() -> dict[str, nn.Module]:
    def trained(norm: nn.Module, training: bool = True) -> nn.Module:
        with torch.no_grad():
            for v in norm.state_dict().values():
                v.copy_(torch.rand(v.shape) + 0.5 if v.is_floating_point() else v)
        return norm.double().train(training)

    return {
        "training": trained(nn.BatchNorm2d(8)),
        "evaluating": trained(nn.BatchNorm2d(8), False),
        "without affine": trained(nn.BatchNorm2d(8, affine=False)),
        "evaluating without affine": trained(nn.BatchNorm2d(8, affine=False), False),
        "without momentum": trained(nn.BatchNorm2d(8, momentum=None)),
        "without tracking": trained(nn.BatchNorm2d(8, track_running_stats=False)),
        "evaluating without tracking": trained(
            nn.BatchNorm2d(8, track_running_stats=False), False
        ),
        "momentum and eps": trained(nn.BatchNorm2d(8, momentum=0.3, eps=0.1)),
        "of vectors": nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), trained(nn.BatchNorm1d(8))
        ),
        "of sequences": nn.Sequential(nn.Flatten(2), trained(nn.BatchNorm1d(8))),
        "frozen": trained(nn.BatchNorm2d(8)).requires_grad_(False),
        "twice": nn.Sequential(
            trained(nn.BatchNorm2d(8)),
            nn.ReLU(inplace=True),
            trained(nn.BatchNorm2d(8)),
        ),
    }


def all_placements(name: str) -> dict[str, Differences]:
    return {place: on_parts(FUNCTIONS[name], place) for place in PLACEMENTS}


def normed_placements(name: str) -> dict[str, Differences]:
    return {
        place: on_parts(len, place, module=batch_norms()[name]) for place in PLACEMENTS
    }


def low_precision(name: str, dtype: torch.dtype) -> dict[str, Differences]:
    return {place: on_parts(FUNCTIONS[name], place, dtype) for place in PLACEMENTS}


def low_precision_norm(dtype: torch.dtype) -> dict[str, Differences]:
    return {
        place: on_parts(len, place, dtype, nn.BatchNorm2d(8)) for place in PLACEMENTS
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    check(on_ranks(WORLD, all_placements, name))


@pytest.mark.parametrize("name", batch_norms())
def test_batch_norm(name: str) -> None:
    check(on_ranks(WORLD, normed_placements, name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "relu",
        "add",
        "x * c11",
        "avg_pool2d 3, 2, 1",
        "adaptive_avg_pool2d 1",
        "flatten",
    ],
)
def test_function_in_half_precision(name: str, dtype: torch.dtype) -> None:
    check(
        on_ranks(WORLD, low_precision, name, dtype),
        {torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_in_half_precision_keeps_its_statistics_in_single(
    dtype: torch.dtype,
) -> None:
    check(
        on_ranks(WORLD, low_precision_norm, dtype),
        {torch.float16: 5e-2, torch.bfloat16: 5e-1}[dtype],
    )


POOLS = ("max", "avg", "lp", "adaptive_max", "adaptive_avg")


def test_every_operator_with_a_rule_is_tested() -> None:
    """Some families have test files of their own."""
    named = {
        "batch_norm",
        "cat",
        "flatten",
        "prelu",
        *(f"conv_transpose{n}d" for n in (1, 2, 3)),
    }
    named |= {
        "group_norm",
        "instance_norm",
        "layer_norm",
        "local_response_norm",
        "rms_norm",
    }
    named |= {f"{kind}_pool{n}d" for kind in POOLS for n in (1, 2, 3)}
    named |= {"interpolate", "pad", "pixel_shuffle", "pixel_unshuffle"}
    families = (einsum, random, reductions, shapes, views)
    assert READERS.keys() == UNARY | N_ARY | named.union(
        *(family.READERS for family in families)
    )
