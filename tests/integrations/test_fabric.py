"""Training under Lightning Fabric: as on one process, in numbers and in files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import hetconv
from hetconv.errors import HetConvError
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
    find_spec("lightning") is None, reason="needs lightning"
)


def new_fabric(**options: Any) -> Any:
    from lightning.fabric import Fabric

    from hetconv.integrations.fabric import SplitStrategy

    world, strategy = dist.get_world_size(), SplitStrategy()
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, **options)
    fabric.launch()
    return fabric


def trained(folder: Path) -> tuple[Run, list[int]]:
    fabric, model = new_fabric(), split_model()
    optimizer, scheduler = optimizer_of(model)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(new_loader(dist.get_rank()))
    assert len(loader) == 5
    assert isinstance(loader.dataset, TensorDataset)
    run, seen = Run([], [], [], {}), []
    for epoch in range(2):
        if epoch == 1:  # what was saved is what one goes on from
            state = {"model": model, "optimizer": optimizer, "epoch": epoch}
            fabric.save(folder / "state.pt", state)
            for p in model.parameters():
                p.data.zero_()
            optimizer.optimizer.state.clear()
            state["epoch"] = 0
            assert fabric.load(folder / "state.pt", state) == {}
            assert state["epoch"] == 1
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            scheduler.step()
            note(run, loss, norm, scheduler)
            seen.append(len(fabric.all_gather(y)))
    assert fabric.all_reduce(loss, reduce_op="sum") == loss
    fabric.save(folder / "optimizer.pt", optimizer.state_dict())
    optimizer.optimizer.state.clear()
    fabric.load_raw(folder / "optimizer.pt", optimizer)
    assert len(optimizer.optimizer.state) == len([*model.parameters()])
    return run._replace(weights=hetconv.full_state_dict(model.module)), seen


def test_a_split_model_trains_as_on_one_process(tmp_path: Path) -> None:
    plain = plain_run()
    for run, seen in on_ranks(2, under_torchrun, trained, tmp_path):
        assert run.differs_from(plain) < 1e-5
        assert seen == [4, 4, 4, 4, 2] * 2
    model, state = new_model(), torch.load(tmp_path / "state.pt")
    optimizer, _ = optimizer_of(model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    weights = plain_run(epochs=1).weights
    assert all(torch.allclose(v, weights[k]) for k, v in model.state_dict().items())
    assert all(s["exp_avg"].shape == p.shape for p, s in optimizer.state.items())


def scaled() -> tuple[bool, float]:
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    fabric = new_fabric(plugins=MixedPrecision("16-mixed", "cpu", scaler))
    model = split_model()
    model, optimizer = fabric.setup(model, optimizer_of(model)[0])
    for overflows in (True, False):
        before = hetconv.full_state_dict(model.module)
        fabric.backward(model(torch.ones(2, 4, 16, 16)).float().sum())
        if overflows and dist.get_rank() == 1:
            next(p for p in model.parameters() if p.numel()).grad.fill_(float("inf"))
        fabric.clip_gradients(
            model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False
        )
        optimizer.step()
        optimizer.zero_grad()
        after = hetconv.full_state_dict(model.module)
        same = all(torch.equal(v, after[k]) for k, v in before.items())
        assert same == overflows
    scaler = fabric.strategy.precision.scaler
    return type(scaler) is hetconv.GradScaler, scaler.get_scale()


def test_an_overflow_on_one_process_skips_the_step_on_all() -> None:
    assert on_ranks(2, under_torchrun, scaled) == [(True, 2.0)] * 2


def refused() -> None:
    fabric, model = new_fabric(), split_model()
    lonely = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(HetConvError, match="set up the model too"):
        lonely.state_dict()
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    plan = plan_of(model := new_model(), splits_of(model, ("filter",), (1,)), 1)
    with pytest.raises(HetConvError, match="split over 1 of 2 ranks"):
        fabric.setup(hetconv.parallelize(model, plan, group=own))


def test_what_hetconv_does_not_know_the_slices_of_is_refused() -> None:
    on_ranks(2, under_torchrun, refused)
