"""Settings of the whole suite."""

import os
from collections.abc import Iterator

if os.environ.get("HETCONV_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import pytest
import torch
from hypothesis import settings

settings.register_profile("hetconv", deadline=None)
settings.load_profile("hetconv")
torch.set_num_threads(1)  # ranks are forked from here


@pytest.fixture(scope="module")
def new_memory_is_nan() -> Iterator[None]:
    """Whatever a kernel leaves unwritten, outputs and workspaces alike, is NaN and fails."""
    torch.use_deterministic_algorithms(True)  # fills new tensors
    assert torch.empty(1).new_empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
