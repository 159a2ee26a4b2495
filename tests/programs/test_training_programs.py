"""Programs that people train with give on shards what they give on one device."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hetconv

from .table import Net, Run, Table

PROGRAMS = Table()


@PROGRAMS.program
def accumulation_with_an_odd_last_batch(run: Run) -> None:
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for sizes in ((2, 2, 1), (3, 1)):
        optimizer.zero_grad(set_to_none=False)
        for n in sizes:
            loss = F.cross_entropy(
                model(run.images(n)), run.labels(n), reduction="sum"
            ) / sum(sizes)
            loss.backward()
            run.note("loss", loss)
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def evaluation_between_steps(run: Run) -> None:
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(run.images()), run.labels()).backward()
        optimizer.step()
        if step % 2:
            model.eval()
            for how in (torch.no_grad, torch.inference_mode):
                with how():
                    run.note(how.__name__, model(run.images(2)).clone())
            run.note("with gradients", model(run.images(1)))
            model.train()


@PROGRAMS.program
def encoder_frozen_before(run: Run) -> None:
    model = Net()
    model.features.requires_grad_(False)
    model = run.parallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(run.images()), run.labels()).backward()
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def encoder_frozen_after_then_tuned(run: Run) -> None:
    """Batch norm in evaluation while the encoder is frozen; then all layers learn at
    rates of their own.
    """
    model = run.parallel(Net())
    model.features.requires_grad_(False).eval()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    for step in range(4):
        if step == 2:
            model.train().requires_grad_(True)
            optimizer.add_param_group(
                {"params": list(model.features.parameters()), "lr": 0.02}
            )
        optimizer.zero_grad()
        F.cross_entropy(model(run.images()), run.labels()).backward()
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def scaled_and_clipped(run: Run) -> None:
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = run.scaler(model, init_scale=8.0, growth_interval=2)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(run.images()), run.labels())).backward()
        scaler.unscale_(optimizer)
        run.note("norm", run.clip(model, 0.2))
        scaler.step(optimizer)
        scaler.update()
        run.note("scale", scaler.get_scale())


@PROGRAMS.program
def schedules_of_the_learning_rate(run: Run) -> None:
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.images()), run.labels())
        loss.backward()
        optimizer.step()
        schedule.step()
        plateau.step(loss.item())
        run.note("rate", optimizer.param_groups[0]["lr"])


@PROGRAMS.program
def optimizer_in_the_backward(run: Run) -> None:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = run.parallel(Net())
    optimizers = {p: torch.optim.Adam([p], 1e-2) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss = F.cross_entropy(model(run.images()), run.labels())
        loss.backward()
        run.note("loss", loss)


@PROGRAMS.program
def hooks_on_parameters_and_results(run: Run) -> None:
    """Gradients are halved by hooks of tensors; what is inside is seen through hooks of
    layers and of a container.
    """
    model, seen = run.parallel(Net()), list[Tensor]()
    model.features.register_forward_hook(
        lambda _, args, y: seen.append(hetconv.gather(y))
    )
    model.features[3].register_forward_hook(lambda _, args, y: y * 0.5)
    model.features[3].register_full_backward_hook(
        lambda _, into, out: seen.append(hetconv.gather(out[0]))
    )
    model.features[0].weight.register_hook(lambda g: g / 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        y = model(run.images())
        y.register_hook(lambda g: g * 3)
        F.cross_entropy(y, run.labels()).backward()
        run.note_gradients(model)
        optimizer.step()
    run.note("seen", seen)


@PROGRAMS.program
def gradients_by_name(run: Run) -> None:
    """A step that `torch.autograd.grad` gives, without an optimizer; the layers' rates differ."""
    model = run.parallel(Net())
    for _ in range(3):
        loss = F.cross_entropy(model(run.images()), run.labels())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(model.parameters(), gradients, strict=True)):
                p -= 0.1 / (i + 1) * g
        run.note("loss", loss)


@PROGRAMS.program
def regions_computed_again(run: Run) -> None:
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        x = run.images().requires_grad_()
        y = checkpoint_sequential(model.features, 2, x, use_reentrant=False)
        y = checkpoint(model.head, y.mean((2, 3)), use_reentrant=bool(step))
        F.cross_entropy(y, run.labels()).backward()
        run.note("input's gradient", x.grad)
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def back_to_the_best_state(run: Run) -> None:
    """States of the model and of its optimizer are kept in memory and in a file, and
    loaded in the middle.
    """
    model = run.parallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    kept = None
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.images()), run.labels())
        loss.backward()
        optimizer.step()
        run.note("loss", loss)
        if step == 1:
            kept = (
                copy.deepcopy(model.state_dict()),
                copy.deepcopy(optimizer.state_dict()),
            )
            torch.save(kept, file := io.BytesIO())
        if step == 2 and kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()))[1])


@PROGRAMS.program
def parts_of_a_sequential(run: Run) -> None:
    """A slice of a container, its modules one by one, and a head of one's own that is not split."""
    model, head = run.parallel(nn.Sequential(*Net().features)), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        shallow, deep = model[:2](run.images()), run.images()
        for layer in model:
            deep = layer(deep)
        y = head(deep.mean((2, 3))) + head(model[2:](shallow).amax((2, 3)))
        F.cross_entropy(y, run.labels(classes=2)).backward()
        run.note("result", y)
        run.note_gradients(model)
        optimizer.step()
    run.note("head", list(head.parameters()))


test_programs = PROGRAMS.test()
