"""`bench split-sm`: how a GPU's driver is asked, how filters are divided, and a run without a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import __main__ as bench
from bench import kernel_checks, split_sm, timing
from bench.kernel_cases import Case
from bench.kernel_checks import Tensors
from bench.split_sm import Slice
from hetconv import kernels
from hetconv.errors import KernelError

CPU = torch.device("cpu")
SMALL = Case("a", 2, 16, 6, 6, 96, 3, 3, 1, 1, 1, "bf16", "K", 96)
PAIR = Slice(88, None), Slice(44, None)


class Driver:
    """Says what a driver would of a GPU, in cuda-bindings' manner, and notes what is made and destroyed."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, sms: int, failing: str = ""):
        self.sms, self.failing, self.living = sms, failing, list[tuple[str, int]]()

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def function(*args: Any) -> tuple[Any, ...]:
            if name == self.failing:
                return (SimpleNamespace(value=801, name="CUDA_ERROR_NOT_SUPPORTED"),)
            return SimpleNamespace(value=0, name="CUDA_SUCCESS"), *getattr(self, f"_{name}")(*args)

        function.__name__ = name
        return function

    def _cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return (index,)

    def _cuDeviceGetDevResource(self, gpu: int, kind: int) -> tuple[Any, ...]:
        return (_sms(self.sms),)

    def _cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, least: int) -> tuple[Any, ...]:
        taken = -(-least // 8) * 8
        return [_sms(taken)], 1, _sms(max(whole.sm.smCount - taken, 0))

    def _cuDevResourceGenerateDesc(self, parts: Sequence[Any], count: int) -> tuple[Any, ...]:
        return (parts[0].sm.smCount,)

    def _cuGreenCtxCreate(self, described: int, gpu: int, flags: int) -> tuple[Any, ...]:
        self.living.append(("context", described))
        return (described,)

    def _cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple[Any, ...]:
        self.living.append(("stream", context))
        return (context,)

    def _cuGreenCtxDestroy(self, context: int) -> tuple[Any, ...]:
        self.living.remove(("context", context))
        assert ("stream", context) not in self.living
        return ()

    def _cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.living.remove(("stream", stream))
        return ()


def _sms(count: int) -> Any:
    return SimpleNamespace(sm=SimpleNamespace(smCount=count))


@pytest.fixture
def of_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Any]:
    """`sliced` as that driver does it, on a device that torch has."""
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: f"stream {stream} of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def of(driver: Driver, sms: int = 88) -> Any:
        monkeypatch.setattr(split_sm, "_driver", lambda: driver)
        return split_sm.sliced(CPU, sms)

    return of


def test_slices_share_nothing_and_are_given_back(of_driver: Any) -> None:
    driver = Driver(132)
    with of_driver(driver) as pair:
        assert pair == (Slice(88, "stream 88 of cpu"), Slice(44, "stream 44 of cpu"))
        assert len(driver.living) == 4
    assert driver.living == []


@pytest.mark.parametrize("failing", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxStreamCreate"])
def test_what_the_driver_refuses_is_named_and_nothing_is_left(failing: str, of_driver: Any) -> None:
    driver = Driver(132, failing)
    with (
        pytest.raises(KernelError, match=f"^{failing}: CUDA_ERROR_NOT_SUPPORTED; green contexts need"),
        of_driver(driver),
    ):
        raise AssertionError
    assert driver.living == []


def test_a_second_slice_must_have_something(of_driver: Any) -> None:
    with pytest.raises(KernelError, match="of 132 multiprocessors, 130 leave none for a second slice"):
        of_driver(Driver(132), 130).__enter__()


def test_a_ratio_is_found_near_that_of_the_speeds() -> None:
    """Which is best where the second slice has more to wait for than its speed alone says."""

    def seconds(sizes: Sequence[int]) -> float:
        return max(sizes[0] / 2, sizes[1] * 1.1)

    assert split_sm.tuned(512, (2.0, 1.0), lambda sizes: max(sizes[0] / 2, sizes[1])) == (336, 176)
    assert split_sm.tuned(512, (2.0, 1.0), seconds) == (352, 160)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices compute one after the other; a way takes as long as the slower one by its multiprocessors."""
    took = [0.0]

    def together(case: Case, pair: split_sm.Pair, sizes: Sequence[int], t: Tensors) -> list[Tensor]:
        took[0] = max(size / one.sms for one, size in zip(pair, sizes, strict=True))
        s = case.spec
        own = [w for w in t.w.split([*sizes]) if len(w)]
        return [kernels.conv2d_forward(t.x, w, None, s.stride, s.padding, s.dilation, s.groups) for w in own]

    def seconds(run: Callable[[], Any]) -> float:
        run()
        return took[0]

    monkeypatch.setattr(split_sm, "together", together)
    monkeypatch.setattr(split_sm, "CALLS", 1)
    monkeypatch.setattr(timing, "seconds", seconds)


def test_filters_are_divided_by_speed_and_computed_right(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = split_sm.measured(SMALL, PAIR, CPU)
    assert found["filters"] == {"tuned": (64, 32), "even": (48, 48), "alone": (96, 0)}
    assert (found["against"]["even"]["ratio"], found["against"]["alone"]["ratio"]) == (pytest.approx(1.5),) * 2
    assert found["of_bound"] == pytest.approx(1.0)
    monkeypatch.setattr(split_sm, "exact", lambda *a: kernel_checks.exact(*a) + 1)
    assert split_sm.measured(SMALL, PAIR, CPU)["wrong"] == "the parts are not the convolution"


def test_a_run_says_and_writes_what_it_found(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def sliced(where: torch.device, sms: int) -> Any:
        assert sms == 88
        yield PAIR

    monkeypatch.setattr(split_sm, "sliced", sliced)
    monkeypatch.setattr(split_sm, "need_cuda", lambda _: CPU)
    monkeypatch.setattr(split_sm, "facts", lambda: {"device": "NVIDIA X1", "sms": 132})
    monkeypatch.setattr(split_sm, "cases", lambda: [SMALL])
    split_sm.run(Namespace(sms=None, budget=None, output=tmp_path / "found.json"))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "NVIDIA X1: slices of 88 and 44 multiprocessors"
    assert "tuned 64:32" in said[1]
    assert "tuned over even: 1.50x" in said
    written = json.loads((tmp_path / "found.json").read_text())
    assert (written["slices"], written["gains"]["even"]) == ([88, 44], pytest.approx(1.5))


def test_its_cases_are_whole_layers() -> None:
    assert len(split_sm.cases()) == len(split_sm.LAYERS)
    assert not any(case.is_slice for case in split_sm.cases())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["split-sm"])
    assert "bench split-sm needs a CUDA device" in capsys.readouterr().err
