"""The study of split ratios, on functions instead of a stopwatch."""

from __future__ import annotations

import pytest

from hetconv.autotune.shares import refine


class Makespan:
    """Devices of these speeds; seconds relative to those of the ratio that was computed."""

    def __init__(self, speeds: tuple[float, ...], computed: tuple[int, ...]):
        self._speeds, self._first = speeds, self._seconds(speeds, computed)
        self.asked: list[tuple[int, ...]] = []

    @staticmethod
    def _seconds(speeds: tuple[float, ...], weights: tuple[int, ...]) -> float:
        return max(w / s for w, s in zip(weights, speeds, strict=True))

    def __call__(self, weights: tuple[int, ...]) -> float:
        self.asked.append(weights)
        return self._seconds(self._speeds, weights) / self._first


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_ratio_is_mended(seed: int) -> None:
    study = Makespan((1.0, 0.5), (58, 42))
    weights, gain, ran = refine((58, 42), study, 30, seed)
    assert gain < 0.9
    assert abs(weights[0] - 67) <= 4
    assert ran == 30


@pytest.mark.parametrize("seed", range(5))
def test_the_result_is_never_worse_than_the_computed_ratio(seed: int) -> None:
    weights, gain, _ = refine((2, 1), lambda w: 1.5, 10, seed)
    assert weights == (2, 1)
    assert gain == 1.0


def test_no_ratio_is_measured_twice_and_the_sum_stays() -> None:
    study = Makespan((1.0, 0.6, 0.3), (10, 6, 4))
    refine((10, 6, 4), study, 25, 0)
    assert len(study.asked) == len(set(study.asked))
    assert {sum(w) for w in study.asked} == {20}


def test_a_device_without_a_share_gets_none() -> None:
    study = Makespan((1.0, 1.0, 1.0), (60, 0, 40))
    refine((60, 0, 40), study, 15, 0)
    assert study.asked
    assert all(w[1] == 0 for w in study.asked)


def test_the_study_repeats_under_its_seed_and_stops_when_told() -> None:
    first, second = Makespan((1.0, 0.5), (60, 40)), Makespan((1.0, 0.5), (60, 40))
    assert refine((60, 40), first, 12, 3) == refine((60, 40), second, 12, 3)
    assert first.asked == second.asked
    assert refine((60, 40), first, 12, 3, lambda: True) == ((60, 40), 1.0, 0)


def test_one_device_leaves_nothing_to_refine() -> None:
    assert refine((8, 0), lambda w: 0.5, 10, 0) == ((8, 0), 1.0, 0)
