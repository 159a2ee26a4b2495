"""Training under accelerate: a split model is that of one process, in numbers and in files."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

import hetconv
from hetconv.errors import HetConvError
from hetconv.integrations.models import check_spans
from tests.integrations.ranks import (
    MAX_NORM,
    Run,
    new_loader,
    new_model,
    note,
    optimizer_of,
    plain_run,
    split_model,
    under_torchrun,
)
from tests.nets import plan_of, splits_of
from tests.spawn import on_ranks

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="needs accelerate"
)


def as_process(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a rank, with an accelerator that knows all of them."""
    from accelerate.state import AcceleratorState

    from hetconv.integrations.accelerate import Accelerator

    try:
        return under_torchrun(lambda: function(Accelerator(cpu=True), *args))
    finally:
        AcceleratorState._reset_state(True)


def trained(accelerator: Any, folder: Path) -> tuple[Run, list[int]]:
    model, seed = split_model(), dist.get_rank()  # another order on each rank
    optimizer, scheduler = optimizer_of(model)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, new_loader(seed), scheduler
    )
    run, seen = Run([], [], [], {}), []
    for epoch in range(2):
        if epoch == 1:  # what was saved is what one goes on from
            accelerator.save_state(folder / "state")
            accelerator.wait_for_everyone()
            for p in model.parameters():
                p.data.zero_()
            optimizer.optimizer.state.clear()
            accelerator.load_state(folder / "state")
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
            note(run, loss, norm, scheduler)
            seen.append(len(accelerator.gather_for_metrics(y)))
    accelerator.save_model(model, folder / "model")
    assert accelerator.num_processes == 1
    assert float(accelerator.reduce(loss)) == float(loss) == accelerator.gather(loss)
    return run._replace(weights=accelerator.get_state_dict(model)), seen


def test_a_split_model_trains_as_on_one_process(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = plain_run()
    for run, seen in on_ranks(2, as_process, trained, tmp_path):
        assert run.differs_from(plain) < 1e-5
        assert seen == [4, 4, 4, 4, 2] * 2
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights.keys() == plain.weights.keys()
    assert all(torch.allclose(v, plain.weights[k]) for k, v in weights.items())


def test_a_saved_state_is_that_of_the_plain_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    on_ranks(2, as_process, trained, tmp_path)
    model = new_model()
    optimizer, _ = optimizer_of(model)
    model.load_state_dict(load_file(tmp_path / "state" / "model.safetensors"))
    optimizer.load_state_dict(torch.load(tmp_path / "state" / "optimizer.bin"))
    plain = plain_run(epochs=1).weights
    assert all(torch.allclose(v, plain[k]) for k, v in model.state_dict().items())
    assert all(s["exp_avg"].shape == p.shape for p, s in optimizer.state.items())


def scaled(accelerator: Any) -> tuple[bool, list[float]]:
    accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=4.0
    )  # as mixed_precision="fp16" has it
    model = split_model()
    optimizer, _ = optimizer_of(model)
    optimizer, model = accelerator.prepare(optimizer, model)
    before = hetconv.full_state_dict(model)
    for overflows in (True, False):
        loss = model(torch.ones(2, 4, 16, 16)).sum()
        optimizer.zero_grad()
        accelerator.backward(loss)
        if overflows and dist.get_rank() == 1:
            next(p for p in model.parameters() if p.numel()).grad.fill_(float("inf"))
        optimizer.step()
        after = hetconv.full_state_dict(model)
        same = all(torch.equal(v, after[k]) for k, v in before.items())
        assert same == overflows
    return type(
        accelerator.scaler
    ) is hetconv.GradScaler, accelerator.scaler.get_scale()


def test_an_overflow_on_one_process_skips_the_step_on_all() -> None:
    assert on_ranks(2, as_process, scaled) == [(True, 2.0)] * 2


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(dist.get_rank(), dist.get_rank() + 5))


def streamed(accelerator: Any) -> list[Any]:
    return [x.tolist() for x in accelerator.prepare(DataLoader(Numbers(), 2))]


def test_batches_of_a_stream_stay_whole() -> None:
    assert on_ranks(2, as_process, streamed) == [[[0, 1], [2, 3], [4]]] * 2


def refused(accelerator: Any) -> None:
    model = split_model()
    optimizer = torch.optim.SGD([*model.parameters()], 0.1)
    lonely = accelerator.prepare(optimizer)
    with pytest.raises(HetConvError, match="set up the model too"):
        lonely.state_dict()
    model = accelerator.prepare(model)
    model(torch.ones(2, 4, 16, 16)).sum().backward()
    accelerator.clip_grad_norm_(model.one.parameters(), 1.0)
    with pytest.raises(HetConvError, match=r"give model\.parameters\(\)"):
        accelerator.clip_grad_norm_([model.one.weight], 1.0)
    plain, own = (
        new_model(),
        dist.new_group([dist.get_rank()], use_local_synchronization=True),
    )
    plan = plan_of(plain, splits_of(plain, ("filter",), (1,)), 1)
    with pytest.raises(HetConvError, match="split over 1 of 2 ranks"):
        accelerator.prepare(hetconv.parallelize(plain, plan, group=own))
    with pytest.raises(HetConvError, match="give accelerate's Accelerator cpu=True"):
        check_spans(model, 1)


def test_what_hetconv_does_not_know_the_slices_of_is_refused() -> None:
    on_ranks(2, as_process, refused)
