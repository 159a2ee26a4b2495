"""Programs that look into a model, change inputs and outputs, meet errors, or use what
it returns in unusual ways.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv

from .table import Net, Run, Table

PROGRAMS = Table()


@PROGRAMS.program
def style_of_layers(run: Run) -> None:
    """An image learns from Gram matrices of what hooks keep, after the call that they are of."""
    model, kept = run.parallel(Net().eval().requires_grad_(False)), list[Tensor]()
    for i in (0, 3):
        model.features[i].register_forward_hook(lambda _, args, y: kept.append(y))
    image = run.images().requires_grad_()
    optimizer = torch.optim.Adam([image], 0.1)
    for _ in range(2):
        kept.clear()
        model(image)
        loss = sum((y.flatten(2) @ y.flatten(2).mT).square().mean() for y in kept)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note("loss", loss.item())
    run.note("image", image)


@PROGRAMS.program
def statistics_of_activations(run: Run) -> None:
    model, kept = run.parallel(Net()), list[Tensor]()
    model.features[0].register_forward_hook(lambda _, args, y: kept.append(y.detach()))
    with torch.no_grad():
        model(run.images())
    run.note(
        "numbers",
        [
            kept[0].mean().item(),
            float(kept[0].abs().max()),
            torch.from_numpy(kept[0].cpu().numpy()),
        ],
    )


@PROGRAMS.program
def hooks_that_change_what_goes_through(run: Run) -> None:
    model = run.parallel(Net())
    model.features[3].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    handle = model.register_forward_hook(lambda _, args, y: y * 3)
    for _ in range(2):
        y = model(run.images())
        y.square().mean().backward()
        run.note("result", y)
        handle.remove()
    run.note_gradients(model)


@PROGRAMS.program
def adversarial_training(run: Run) -> None:
    """Inputs are moved along the sign of their gradient, as PGD does, in evaluation;
    the model learns from them.
    """
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        x, labels, moved = run.images(), run.labels(), torch.zeros(3, 3, 9, 7)
        model.eval()
        for _ in range(3):
            moved.requires_grad_()
            (g,) = torch.autograd.grad(F.cross_entropy(model(x + moved), labels), moved)
            moved = (moved.detach() + 0.1 * g.sign()).clamp(-0.2, 0.2)
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x + moved), labels).backward()
        optimizer.step()
        run.note("moved", moved)


class WithLoss(nn.Module):
    """Arguments and results as transformers has them: keywords, a loss if there are
    labels, hidden states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, hidden: bool = False
    ) -> dict[str, Any]:
        features = self.net.features(pixel_values)
        found: dict[str, Any] = {"logits": self.net.head(features.mean((2, 3)))}
        if labels is not None:
            found["loss"] = F.cross_entropy(found["logits"], labels)
        return found | ({"hidden_states": (pixel_values, features)} if hidden else {})


@PROGRAMS.program
def losses_within_the_model(run: Run) -> None:
    model = run.parallel(WithLoss())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        found = model(pixel_values=run.images(), labels=run.labels(), hidden=True)
        optimizer.zero_grad()
        (found["loss"] + found["hidden_states"][1].square().mean()).backward()
        optimizer.step()
        run.note("found", found)
    run.note("without labels", model(run.images()))


@PROGRAMS.program
def errors_that_are_caught(run: Run) -> None:
    """An input that does not fit, and an error in the middle of a forward; training
    goes on after both.
    """
    model, fails = run.parallel(Net()), [False]

    def fail(*_: Any) -> None:
        if fails[0]:
            raise ValueError("caught below")

    model.features[4].register_forward_hook(fail)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with contextlib.suppress(ValueError, RuntimeError):
            model(torch.randn(2, 4, 9, 7))
        fails[0] = True
        with contextlib.suppress(ValueError):
            model(run.images())
        fails[0] = False
        optimizer.zero_grad()
        F.cross_entropy(model(run.images()), run.labels()).backward()
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def two_losses_of_one_graph(run: Run) -> None:
    """Two backwards, the gradients of a few parameters, and a penalty on all of them."""
    model = run.parallel(Net())
    y = model(run.images())
    y.square().mean().backward(retain_graph=True)
    (sum(p.abs().sum() for p in model.parameters()) * 0.01).backward()
    own = list(model.parameters())
    torch.autograd.grad(y.square().sum(), [own[0], own[-1]], retain_graph=True)
    y.mean().backward(inputs=own[2:4])
    run.note_gradients(model)


@PROGRAMS.program
def writes_in_place_around_a_call(run: Run) -> None:
    model = run.parallel(Net().eval())
    x = run.images()
    with torch.no_grad():
        y = model(x.mul_(2))
    x.zero_()
    run.note("of what the input was", y)
    y = model(run.images())
    y.mul_(2).add_(1)
    y.square().mean().backward()
    run.note("result", y)
    run.note_gradients(model)


@PROGRAMS.program
def a_batch_of_nothing(run: Run) -> None:
    model = run.parallel(Net().eval())
    for samples in (0, 2, 0):
        y = model(run.images(samples))
        y.square().sum().backward()
        run.note("result", y)
        run.note_gradients(model)


@PROGRAMS.program
def batch_norms_frozen_by_a_function(run: Run) -> None:
    model = run.parallel(Net()).train()
    model.apply(
        lambda m: (
            m.eval().requires_grad_(False) if isinstance(m, nn.BatchNorm2d) else None
        )
    )
    F.cross_entropy(model(run.images()), run.labels()).backward()
    run.note_gradients(model)


@PROGRAMS.program
def layers_left_out(run: Run) -> None:
    model = run.parallel(Net())
    model.features, model.head = model.features[:3], nn.Linear(6, 4)
    F.cross_entropy(model(run.images()), run.labels()).backward()
    run.note_gradients(model)


@PROGRAMS.program
def other_optimizers(run: Run) -> None:
    """Those that compute each number by itself; some at once for all parameters, of
    which some may be empty.
    """
    for name in (
        "Adadelta",
        "Adagrad",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "Rprop",
        "RMSprop",
        "Adam",
        "SGD",
    ):
        options: dict[str, Any] = (
            {"fused": True} if name in ("Adam", "SGD") else {"foreach": True}
        )
        model = run.parallel(Net(), name)
        optimizer = getattr(torch.optim, name)(model.parameters(), 1e-2, **options)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(run.images()), run.labels()).backward()
            optimizer.step()


@PROGRAMS.program
def gradients_of_a_gathered_activation(run: Run) -> None:
    """As Grad-CAM wants them: a hook puts the gathered activation in the place of the
    one in parts.
    """
    model, kept = run.parallel(Net().eval()), list[Tensor]()

    def keep(_: nn.Module, args: Any, y: Tensor) -> Tensor:
        kept.append(hetconv.gather(y))
        kept[-1].retain_grad()
        return kept[-1]

    model.features[3].register_forward_hook(keep)
    model(run.images())[:, 1].sum().backward()
    activation, gradient = kept[0], kept[0].grad
    assert gradient is not None
    run.note("map", F.relu((gradient.mean((2, 3), keepdim=True) * activation).sum(1)))


test_programs = PROGRAMS.test()
