"""Calls of models in workers: results, errors, threads."""

from __future__ import annotations

import doctest
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hetconv
from hetconv.runtime.rank_devices import device_identity
from tests.workers.models import Failing, Found, Nested, VaeDecoder, height_plan

DATA_SHEETS = hetconv.ClusterProfile.from_devices(["cpu", "cpu"], link="host")


@pytest.fixture(scope="module")
def workers() -> Iterator[hetconv.Workers]:
    """Two ranks, for models that each test plans by its profile."""
    with hetconv.Workers(DATA_SHEETS, ["cpu", "cpu"]) as both:
        yield both


def image(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def by_plan(workers: hetconv.Workers, model: nn.Module, plan: hetconv.Plan) -> Any:
    """The model as workers that were given the plan have it, without starting others."""
    profile, workers._how = workers._how, plan
    try:
        return workers.parallelize(model)
    finally:
        workers._how = profile


def failing(workers: hetconv.Workers) -> tuple[Failing, Any]:
    model = Failing().eval()
    return model, by_plan(workers, model, height_plan(model, image(1, 2, 9, 8)))


def test_a_vae_decodes_as_it_does_alone(workers: hetconv.Workers) -> None:
    torch.manual_seed(0)
    model, latent = VaeDecoder().eval(), torch.randn(1, 4, 12, 8)
    plan = height_plan(model, latent)
    assert any(split.kind == "height" for split in plan.splits.values())
    decode = by_plan(workers, model, plan)
    with torch.no_grad():
        wanted = model(latent)
    found = decode(latent)
    assert type(found) is type(wanted)
    assert_close(found.sample, wanted.sample, rtol=1e-5, atol=1e-5)
    (again,) = decode(latent, return_dict=False)
    assert_close(again, wanted.sample, rtol=1e-5, atol=1e-5)
    assert not list(decode.parameters())


def test_nested_arguments_and_results_are_those_of_the_model(
    workers: hetconv.Workers,
) -> None:
    model = Nested().eval()
    base = image(1, 4, 9, 8)
    x, whole = base[:, 1:3], torch.arange(6)
    more = {"a": [whole, whole[2:4]], "b": [torch.ones((), dtype=torch.bfloat16)]}
    split = workers.parallelize(model)
    assert split.plan is None
    found = split(x, more=more, scale=2.0)
    with torch.no_grad():
        wanted = model(x, more=more, scale=2.0)
    assert type(found) is Found
    assert_close(found.image, wanted.image)
    assert found.others.keys() == wanted.others.keys()
    for name in more:
        assert_close(found.others[name], wanted.others[name])
    assert split.plan is not None
    assert split.plan.inputs[0] == (1, 2, 9, 8)
    found.image.zero_()  # it is this process's own
    assert_close(split(x, more=more, scale=2.0).image, wanted.image)


def test_results_are_kept_while_later_calls_are_larger_and_smaller(
    workers: hetconv.Workers,
) -> None:
    model, split = failing(workers)
    assert not os.fstat(workers._processes.models.descriptor).st_size  # it was freed
    images = [image(1, 2, size, 8) for size in (9, 300, 5, 200)]
    found = [split(x) for x in images]
    with torch.no_grad():
        for y, x in zip(found, images, strict=True):
            assert_close(y, model(x))


def test_an_error_on_all_ranks_comes_with_its_traceback_and_the_workers_go_on(
    workers: hetconv.Workers,
) -> None:
    model, split = failing(workers)
    x = image(1, 2, 9, 8)
    with pytest.raises(KeyError) as error:
        split(x, "raise")
    assert "Caught KeyError in the worker of rank" in str(error.value)
    assert 'raise KeyError("of the\\nmodel")' in str(error.value)
    assert "closed" not in str(error.value)
    with pytest.raises(RuntimeError, match=r"(?s)sys.exit\(3\).*SystemExit"):
        split(x, "exit")
    with pytest.raises(hetconv.HetConvError, match=r"expects .N, 2, H, W.") as refused:
        split(image(1, 3, 9, 8))
    assert "\n" not in str(refused.value)
    assert "in forward" in refused.value.__notes__[0]
    with torch.no_grad():
        assert_close(split(x), model(x))


def test_what_cannot_be_sent_is_refused_and_the_workers_go_on(
    workers: hetconv.Workers,
) -> None:
    model, split = failing(workers)
    x = image(1, 2, 9, 8)
    with pytest.raises(
        hetconv.HetConvError, match=r"an argument cannot be sent.*lambda"
    ):
        split(x, lambda: 0)
    model.hook = lambda: 0  # type: ignore[assignment]
    with pytest.raises(hetconv.HetConvError, match=r"the model cannot be sent.*lambda"):
        workers.parallelize(model, x)
    with pytest.raises(hetconv.HetConvError, match="meta device"):
        workers.parallelize(Failing().eval().to("meta"), x.to("meta"))
    with pytest.raises(hetconv.PlanError, match="no convolution or linear layer"):
        workers.parallelize(nn.ReLU(), x)
    with pytest.raises(hetconv.PlanError, match=r"'0'.*no such module"):
        by_plan(workers, Failing(), height_plan(nn.Sequential(model.conv), x))
    with pytest.raises(hetconv.HetConvError, match=r"takes a plain torch\.nn\.Module"):
        workers.parallelize(model.forward)  # type: ignore[arg-type]
    with pytest.raises(hetconv.HetConvError, match=r"takes a plain torch\.nn\.Module"):
        workers.parallelize(split)
    with pytest.raises(hetconv.HetConvError, match="neither pickled nor copied"):
        torch.save(split, "nowhere.pt")
    with torch.no_grad():
        assert_close(split(x), model(x))


def test_gradients_are_refused(workers: hetconv.Workers) -> None:
    model, split = failing(workers)
    x = image(1, 2, 9, 8).requires_grad_()
    with pytest.raises(hetconv.HetConvError, match="an argument requires one; detach"):
        split(x)
    with torch.no_grad():
        assert_close(split(x), model(x))
    split.train()
    with pytest.raises(hetconv.HetConvError, match="in training mode"):
        split(x.detach())
    with torch.inference_mode():
        assert_close(split(x), model(x))


def test_modes_autocast_and_random_numbers(workers: hetconv.Workers) -> None:
    norm = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)).eval()
    x = image(2, 2, 9, 8)
    split = workers.parallelize(norm, (x,))
    split.train()
    with torch.no_grad():
        assert_close(split(x), norm.train()(x))
        assert_close(split.eval()(x), norm.eval()(x))  # with new statistics
    _, split = failing(workers)
    with torch.autocast("cpu", torch.float16):
        assert split(x[:1]).dtype == torch.float16
    assert split(x[:1]).dtype == torch.float32
    assert not split(x[:1], "draw").equal(split(x[:1], "draw"))


def test_threads_take_turns(workers: hetconv.Workers) -> None:
    model, split = failing(workers)
    assert not os.fstat(workers._processes.models.descriptor).st_size  # it was freed
    images = [image(1, 2, 5 + i, 8) for i in range(8)]
    found: dict[int, Tensor] = {}

    def call(i: int) -> None:
        for _ in range(5):
            found[i] = split(images[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    with torch.no_grad():
        for i, x in enumerate(images):
            assert_close(found[i], model(x))


def test_a_model_that_nothing_refers_to_is_dropped_by_the_workers(
    workers: hetconv.Workers,
) -> None:
    _, first = failing(workers)
    _, second = failing(workers)
    key = first.key
    del first
    assert key in workers._unused
    second(image(1, 2, 9, 8))
    assert not workers._unused
    second.key = key
    with pytest.raises(KeyError):
        second(image(1, 2, 9, 8))


def test_the_example_of_the_documentation_runs() -> None:
    source = hetconv.Workers.__doc__
    assert source is not None
    names = {"hetconv": hetconv, "torch": torch}
    example = doctest.DocTestParser().get_doctest(source, names, "Workers", None, 0)
    runner = doctest.DocTestRunner()
    runner.run(example)
    assert runner.summarize() == (0, 4)


def test_a_measured_profile_is_matched_with_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A profile knows a CPU by its threads, and workers take theirs from this variable.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    device = DATA_SHEETS.devices[0]
    slow, fast = (
        replace(device, name=name, identity=device_identity("cpu", speed))
        for name, speed in (("slow", 0.5), ("fast", 1.0))
    )
    profile = replace(DATA_SHEETS, devices=(slow, fast))
    with hetconv.Workers(profile, ["cpu"]) as workers:
        split = workers.parallelize(nn.Conv2d(2, 4, 3).eval(), image(1, 2, 9, 8))
        assert split.plan is not None
        assert split.plan.devices == ("fast",)
