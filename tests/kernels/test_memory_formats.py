"""Memory formats of images and filters: which is the fastest, and tensors in each."""

from __future__ import annotations

import pytest
import torch

from hetconv import kernels
from hetconv.sharding.conv_spec import MemoryFormat


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cpu", "AVX2", "contiguous_format"),
        ("cpu", "AVX512", "channels_last"),
        ("cpu", "DEFAULT", "channels_last"),
        ("cuda", "AVX2", "channels_last"),
    ],
)
def test_contiguous_images_are_fastest_on_cpus_with_narrow_vectors(
    device: str,
    capability: str,
    expected: MemoryFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert kernels.fastest_format(torch.device(device)) == expected


@pytest.mark.parametrize(
    ("dims", "last"), [(4, torch.channels_last), (5, torch.channels_last_3d)]
)
def test_images_and_volumes_are_brought_to_a_format(
    dims: int, last: torch.memory_format
) -> None:
    x = torch.randn([2, 3, 4, 5, 6][:dims])
    y = kernels.in_format(x, "channels_last")
    assert y.is_contiguous(memory_format=last)
    assert y.equal(x)
    assert kernels.in_format(x, "contiguous_format") is x
    assert kernels.in_format(y, "contiguous_format").is_contiguous()


def test_what_is_no_image_stays_contiguous() -> None:
    x = torch.randn(2, 3, 4)
    assert kernels.in_format(x, "channels_last") is x
