"""Programs that people train with give on parts what they give on one device."""

from __future__ import annotations

import copy
import io
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hetconv

from .table import Run, Table

PROGRAMS = Table()


class Net(nn.Module):
    """Features and a head, as classifiers have them."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.body(z)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
            nn.InstanceNorm2d(8, affine=True), nn.Softplus(),
        )  # fmt: skip
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.body(x).mean((2, 3)))


@PROGRAMS.program
def gan_with_gradient_penalty(run: Run) -> None:
    """Two models with an optimizer each; the critic is frozen while the generator learns."""
    generator, critic = run.parallel(Generator(), "generator"), run.parallel(Critic(), "critic")
    of_generator = torch.optim.Adam(generator.parameters(), 1e-2, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.0, 0.9))
    for _ in range(2):
        critic.requires_grad_(True)
        real, fake = run.images(), generator(run.images()).detach()
        mixed = real.lerp(fake, 0.25).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
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
    generator, critic = run.parallel(Generator(), "generator"), run.parallel(Critic(), "critic")
    of_both = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 0.05)
    for _ in range(2):
        of_both.zero_grad()
        fake = generator(run.images())
        critic(fake.detach()).sigmoid().mean().backward()
        F.softplus(-critic(fake)).mean().backward(retain_graph=True, inputs=list(generator.parameters()))
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
    """Averages of parameters, kept by name, stand in the model for an evaluation, and leave it again."""
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
def accumulation_with_an_odd_last_batch(run: Run) -> None:
    model = run.parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for sizes in ((2, 2, 1), (3, 1)):
        optimizer.zero_grad(set_to_none=False)
        for n in sizes:
            loss = F.cross_entropy(model(run.images(n)), run.labels(n), reduction="sum") / sum(sizes)
            loss.backward()
            run.note("loss", loss)
        run.note_gradients(model)
        optimizer.step()


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
    """Three forwards; the anchor's features are used by themselves too, and one branch has no gradient."""
    model = run.parallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        anchor, positive = model.features(run.images()), model(run.images())
        with torch.no_grad():
            negative = model(run.images())
        loss = F.triplet_margin_loss(model.head(anchor.mean((2, 3))), positive, negative, margin=2.0)
        optimizer.zero_grad()
        (loss + anchor.abs().mean()).backward()
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
    """Batch norm in evaluation while the encoder is frozen; then all layers learn at rates of their own."""
    model = run.parallel(Net())
    model.features.requires_grad_(False).eval()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    for step in range(4):
        if step == 2:
            model.train().requires_grad_(True)
            optimizer.add_param_group({"params": list(model.features.parameters()), "lr": 0.02})
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
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
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
    """Gradients are halved by hooks of tensors; what is inside is seen through hooks of layers and of a container."""
    model, seen = run.parallel(Net()), list[Tensor]()
    model.features.register_forward_hook(lambda _, args, y: seen.append(hetconv.gather(y)))
    model.features[3].register_forward_hook(lambda _, args, y: y * 0.5)
    model.features[3].register_full_backward_hook(lambda _, into, out: seen.append(hetconv.gather(out[0])))
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
    """States of the model and of its optimizer are kept in memory and in a file, and loaded in the middle."""
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
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
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


@PROGRAMS.program
def features_of_a_frozen_model_in_a_loss(run: Run) -> None:
    """As a perceptual loss has them: gradients go through the frozen model to the one that learns."""
    frozen, model = run.parallel(Net().eval().requires_grad_(False), "frozen"), run.parallel(Generator())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        made, wanted = frozen.features(model(run.images())), frozen.features(run.images())
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
            self.first, self.between = run.parallel(Generator(), "first"), nn.Conv2d(3, 3, 1)
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
