"""Training by transformers' Trainer: as on one process, in numbers and in files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetconv
from hetconv.errors import HetConvError
from tests.integrations.ranks import under_torchrun
from tests.nets import plan_of, splits_of
from tests.spawn import on_ranks

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("accelerate", "transformers")),
    reason="needs accelerate and transformers",
)
OPTIONS: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_steps": 2,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def new_model() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic"
    )
    return ResNetForImageClassification(config)


def data() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(12, 3, 16, 16, generator=draw)
    return [{"pixel_values": x, "labels": i % 2} for i, x in enumerate(images)]


def trained(folder: Path, resume: bool) -> list[Any]:
    """What is logged: losses, norms of gradients, learning rates and the final evaluation."""
    if dist.get_world_size() > 1:
        from hetconv.integrations.transformers import Trainer, TrainingArguments
    else:
        from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(folder), **OPTIONS)
    model = new_model()
    if dist.get_world_size() > 1:
        splits = splits_of(model, ("filter", "channel", "height"), (3, 1))
        model = hetconv.parallelize(model, plan_of(model, splits, 2))
    trainer = Trainer(
        model,
        args,
        train_dataset=data(),
        eval_dataset=data()[:7],
        compute_metrics=lambda p: {"seen": len(p.label_ids)},
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer.save_model(str(folder / "last"))
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_seen")
    logged = [[e[k] for k in keys if k in e] for e in trainer.state.log_history]
    return [e for e in logged if e]


def near(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x == pytest.approx(y, rel=1e-4) for x, y in pairs)


def test_a_split_model_trains_as_on_one_process(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (plain,) = on_ranks(1, under_torchrun, trained, tmp_path / "plain", False)
    assert len(plain) == 5  # 4 steps and an evaluation
    for split in on_ranks(2, under_torchrun, trained, tmp_path / "split", False):
        assert near(split, plain)
    # From the plain model's checkpoint the split one goes on, and the other way round.
    for folder, world in (("plain", 2), ("split", 1)):
        (tmp_path / folder / "checkpoint-4").rename(tmp_path / f"{folder} at 4")
        for again in on_ranks(world, under_torchrun, trained, tmp_path / folder, True):
            assert near(again, plain)
    names = [
        tmp_path / name / "last" / "model.safetensors" for name in ("plain", "split")
    ]
    ours, theirs = map(load_file, names)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(v, theirs[k], atol=1e-5) for k, v in ours.items())


def refused(folder: Path) -> None:
    import transformers

    from hetconv.integrations.transformers import Trainer

    args = transformers.TrainingArguments(str(folder), use_cpu=True, report_to="none")
    with pytest.raises(
        HetConvError, match=r"give hetconv\.integrations\.transformers\.Tr"
    ):
        Trainer(new_model(), args)


def test_arguments_that_count_replicas_are_refused(tmp_path: Path) -> None:
    on_ranks(2, under_torchrun, refused, tmp_path)
