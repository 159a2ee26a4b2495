"""Programs with several models, several calls before one backward, or parameters beside
the model.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .table import Critic, Generator, Net, Run, Table

PROGRAMS = Table()


@PROGRAMS.program
def gan_with_gradient_penalty(run: Run) -> None:
    """Two models with an optimizer each; the critic is frozen while the generator learns."""
    generator, critic = (
        run.parallel(Generator(), "generator"),
        run.parallel(Critic(), "critic"),
    )
    of_generator = torch.optim.Adam(generator.parameters(), 1e-2, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.0, 0.9))
    for _ in range(2):
        critic.requires_grad_(True)
        real, fake = run.images(), generator(run.images()).detach()
        mixed = real.lerp(fake, 0.25).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = (
            critic(fake).mean()
            - critic(real).mean()
            + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        )
        of_critic.zero_grad()
        loss.backward()
        run.note("critic's loss", loss)
        of_critic.step()
        critic.requires_grad_(False)
        loss = -critic(generator(run.images())).mean()
        of_generator.zero_grad()
        loss.backward()
        run.note("generator's loss", loss)
        run.note_gradients(generator)
        of_generator.step()


@PROGRAMS.program
def gan_in_one_graph(run: Run) -> None:
    """The critic's loss goes back through the generator's graph, which is used twice."""
    generator, critic = (
        run.parallel(Generator(), "generator"),
        run.parallel(Critic(), "critic"),
    )
    of_both = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 0.05)
    for _ in range(2):
        of_both.zero_grad()
        fake = generator(run.images())
        critic(fake.detach()).sigmoid().mean().backward()
        F.softplus(-critic(fake)).mean().backward(
            retain_graph=True, inputs=list(generator.parameters())
        )
        (fake - run.images()).abs().mean().backward()
        run.note_gradients(generator)
        run.note_gradients(critic)
        of_both.step()


@PROGRAMS.program
def mean_teacher(run: Run) -> None:
    """The teacher is a copy of the parallelized student and follows its parameters and buffers."""
    student = run.parallel(Net())
    teacher = run.watched(copy.deepcopy(student).requires_grad_(False), "teacher")
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2)
    for _ in range(3):
        x = run.images()
        with torch.no_grad():
            wanted = teacher(x + 0.1).softmax(1)
        loss = F.cross_entropy(student(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note("loss", loss)
        with torch.no_grad():
            for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            for p, q in zip(student.buffers(), teacher.buffers(), strict=True):
                q.copy_(p)


@PROGRAMS.program
def average_in_a_dict(run: Run) -> None:
    """Averages of parameters, kept by name, stand in the model for an evaluation, and
    leave it again.
    """
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(run.images()), run.labels()).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.2)
        kept = {name: p.data for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data = shadow[name]
        with torch.no_grad():
            run.note("averaged", model.eval()(run.images()))
        for name, p in model.train().named_parameters():
            p.data = kept[name]


@PROGRAMS.program
def siamese(run: Run) -> None:
    """Two forwards, then one backward."""
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        a, b = model(run.images()), model(run.images())
        loss = F.cosine_embedding_loss(a, b, torch.tensor([1.0, -1.0, 1.0]))
        optimizer.zero_grad()
        loss.backward()
        run.note("loss", loss)
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def triplets(run: Run) -> None:
    """Three forwards; the anchor's features are used by themselves too, and one branch
    has no gradient.
    """
    model = run.parallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        anchor, positive = model.features(run.images()), model(run.images())
        with torch.no_grad():
            negative = model(run.images())
        loss = F.triplet_margin_loss(
            model.head(anchor.mean((2, 3))), positive, negative, margin=2.0
        )
        optimizer.zero_grad()
        (loss + anchor.abs().mean()).backward()
        run.note("loss", loss)
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def features_of_a_frozen_model_in_a_loss(run: Run) -> None:
    """As a perceptual loss has them: gradients go through the frozen model to the one
    that learns.
    """
    frozen, model = (
        run.parallel(Net().eval().requires_grad_(False), "frozen"),
        run.parallel(Generator()),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        made, wanted = (
            frozen.features(model(run.images())),
            frozen.features(run.images()),
        )
        loss = F.l1_loss(made, wanted)
        loss.backward()
        run.note("loss", loss)
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def one_model_after_another(run: Run) -> None:
    """A split model within a plain one, which is trained with it, beside a second split one."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between = (
                run.parallel(Generator(), "first"),
                nn.Conv2d(3, 3, 1),
            )
            self.second = run.parallel(Critic(), "second")

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.between(self.first(x)).relu())

    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(run.images()).square().mean()
        loss.backward()
        optimizer.step()
        run.note("loss", loss)
    run.note("between", list(model.between.parameters()))


@PROGRAMS.program
def learning_to_learn(run: Run) -> None:
    """As MAML has it: the loss after a step, differentiated through that step."""
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        own = dict(model.named_parameters())
        loss = F.cross_entropy(
            functional_call(model, own, (run.images(),)), run.labels()
        )
        gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        fast = {
            name: p - 0.5 * g
            for (name, p), g in zip(own.items(), gradients, strict=True)
        }
        loss = F.cross_entropy(
            functional_call(model, fast, (run.images(),)), run.labels()
        )
        optimizer.zero_grad()
        loss.backward()
        run.note("loss", loss)
        run.note_gradients(model)
        optimizer.step()


@PROGRAMS.program
def with_parameters_of_ones_own(run: Run) -> None:
    """Parameters are kept beside the model and given to each call."""
    model = run.parallel(Net())
    kept = {
        name: (p.detach() * 1.5).requires_grad_()
        for name, p in model.named_parameters()
    }
    for _ in range(2):
        loss = F.cross_entropy(
            functional_call(model, kept, (run.images(),)), run.labels()
        )
        gradients = torch.autograd.grad(loss, list(kept.values()))
        kept = {
            n: (p - 0.1 * g).detach().requires_grad_()
            for (n, p), g in zip(kept.items(), gradients, strict=True)
        }
        run.note("loss", loss)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])


@PROGRAMS.program
def recurrent_over_frames(run: Run) -> None:
    """One model called for each frame, its result fed back; gradients go through all of them."""
    model = run.parallel(Generator())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        states = [run.images(2)]
        for _ in range(3):
            states.append(model(states[-1] + run.images(2)))
        loss = sum((b - a).square().mean() for a, b in pairwise(states))
        loss.backward()
        run.note("states", states[1:])
        run.note_gradients(model)
        optimizer.step()


test_programs = PROGRAMS.test()
