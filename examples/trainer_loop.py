"""Trains an image classifier with the Trainer of Hugging Face's transformers.

    torchrun --nproc-per-node 2 --standalone examples/trainer_loop.py checkpoints

Without torchrun it is the plain program. The weights and images are random.
"""

import sys

import any_torch  # noqa: F401  # this checkout alone needs it
import torch
import torch.distributed as dist
from transformers import ResNetConfig, ResNetForImageClassification

import hetconv
from hetconv.integrations.transformers import Trainer, TrainingArguments


def main(out: str = "out/trainer") -> None:
    arguments = TrainingArguments(
        out,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="epoch",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    torch.manual_seed(0)
    images = torch.randn(20, 3, 64, 64)
    data = [{"pixel_values": x, "labels": i % 2} for i, x in enumerate(images)]
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    model = ResNetForImageClassification(config)
    if dist.is_initialized():
        # From data sheets. Once tuned: plan = hetconv.Plan.load("plan.json")
        profile = hetconv.ClusterProfile.from_devices(f"{dist.get_world_size()}xcpu")
        graph = hetconv.capture(model, torch.zeros(4, 3, 64, 64))
        plan = hetconv.make_plan(graph, profile)
        model = hetconv.parallelize(model, plan)
        print(f"rank {dist.get_rank()}: {plan.chosen}", flush=True)

    trainer = Trainer(model, arguments, train_dataset=data[:16], eval_dataset=data[16:])
    trainer.train()
    trainer.save_model()  # the plain model
    for entry in trainer.state.log_history:
        if "loss" in entry and trainer.is_world_process_zero():
            print(
                f"loss {entry['loss']:.6f}, norm {entry['grad_norm']:.6f}", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
