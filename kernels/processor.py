"""What the host's processor and the libraries that torch was built with compute fast."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch


def short_vectors() -> bool:
    """Whether this processor's vectors hold 8 numbers of float32, not 16."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def long_vectors() -> bool:
    """Whether they hold 16."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@cache
def has_products() -> bool:
    """Whether torch multiplies matrices of float32 by oneDNN, where it is asked to."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def in_full() -> bool:
    """Whether oneDNN may be asked, and computes in all of float32's digits: the user may want neither."""
    onednn = torch.backends.mkldnn
    asked: tuple[str, ...] = (onednn.matmul.fp32_precision, onednn.conv.fp32_precision)  # type: ignore[attr-defined]
    return bool(onednn.enabled) and all(precision in ("none", "ieee") for precision in asked)


@cache
def halved_by_mkl() -> bool:
    """Whether MKL, by which torch multiplies matrices by default, leaves half of the processor's vectors unused.

    On processors that are not Intel's it takes long ones for short.
    """
    return torch.backends.mkl.is_available() and long_vectors() and as_linux_says("vendor_id") == "AuthenticAMD"


def as_linux_says(what: str) -> str:
    """Of the first processor, its "vendor_id" or "model name"; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), "")
