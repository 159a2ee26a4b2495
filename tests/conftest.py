"""Settings of the whole suite."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if os.environ.get("HETCONV_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from bench.shared.torchvision_operators import declare_operators
from hetconv import kernels
from hetconv.kernels.launchers.decisions import forget_decisions
from tests.spawn import DEVICE, PRELOADED

declare_operators()
if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    # The interpreter looks for overflows of integers and, unless it debugs, forgets
    # what it finds: half of its time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

settings.register_profile("hetconv", deadline=None)
settings.load_profile("hetconv")
torch.set_num_threads(1)  # ranks are forked from here
# PyTorch's test utilities, which its databases and opcheck import, call this; then no
# later test could set a flag.
torch.backends.disable_global_flags = lambda: None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-laws",
        action="store_true",
        help="run the laws over PyTorch's own operators and modules on all of these, not on a "
        "drawn sample",
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Says at once what fails on a GPU, where a run may be stopped before pytest's own summary."""
    if (
        report.failed
        and DEVICE.type == "cuda"
        and "PYTEST_XDIST_WORKER" not in os.environ
    ):
        print(
            f"\nFAILED {report.nodeid}\n{report.longreprtext[-5000:]}\n{report.capstderr[:3000]}\n",
            flush=True,
        )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--whole-laws"):
        for item in items:
            if "whole_laws" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imports libraries once, before ranks are forked, if many tests need them."""
    if {"integrations", "models"} & {item.path.parent.name for item in session.items}:
        PRELOADED.append("tests.libraries")
    gc.freeze()  # no garbage collection looks at thousands of tests again


@pytest.fixture
def whole_laws(pytestconfig: pytest.Config) -> bool:
    """Whether all operators and modules of PyTorch's own databases are to be run, which
    takes an hour.
    """
    return bool(pytestconfig.getoption("--whole-laws"))


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    yield
    kernels.set_backend("auto")
    forget_decisions()  # tests replace what these depend on
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def new_memory_is_nan() -> Iterator[None]:
    """Whatever a kernel leaves unwritten, outputs and workspaces alike, is NaN and fails."""
    torch.use_deterministic_algorithms(True)  # fills new tensors
    assert torch.empty(1).new_empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def sparse() -> Iterator[Callable[[Tensor, int], Tensor]]:
    """The same numbers, each sample that many elements after the one before; only they
    take memory on a CPU.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False

    def spread(t: Tensor, stride: int) -> Tensor:
        N, C, H, W = t.shape
        storage = torch.empty(
            (N - 1) * stride + C * H * W, dtype=t.dtype, device=t.device
        )
        return storage.as_strided(t.shape, (stride, 1, W * C, C)).copy_(t)

    yield spread
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process, in a folder of its own: exit status, what
    it says, what is wrong.
    """
    # It imports optuna and rich, which most tests do without.
    from hetconv.autotune.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hetconv", *args])
        with pytest.raises(SystemExit) as exit_:
            main.main()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, *capsys.readouterr()

    return run
