"""A training program that writes its weights after each iteration. Words choose how it handles its gradients.

If there are several ranks, each also writes the iterations in which gradients were exchanged to `exchanges<rank>.txt`.
"""

import contextlib
import itertools
import os
import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

WORDS = sys.argv[1:]
BATCH = int(next((word[6:] for word in WORDS if word.startswith("batch=")), 32))
OWN = int(next((word[4:] for word in WORDS if word.startswith("own=")), 1))
RANK, WORLD = os.environ.get("RANK", ""), int(os.environ.get("WORLD_SIZE", "1"))


def has(word):
    return word in WORDS


torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 6), torch.randn(512, 2))
sampler = None
if WORLD > 1:
    torch.distributed.init_process_group("gloo")
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
parameters = list(model.parameters())
trained = nn.parallel.DistributedDataParallel(model, static_graph=has("static")) if WORLD > 1 else model
if has("three"):
    optimizers = [torch.optim.SGD(each, lr=0.05) for each in (parameters[:2], parameters[2:3], parameters[3:])]
elif has("hooked"):
    optimizers = [torch.optim.SGD([each], lr=0.05) for each in parameters]
elif has("two"):
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.05), torch.optim.SGD(parameters[2:], lr=0.05)]
elif has("lbfgs"):
    optimizers = [torch.optim.LBFGS(parameters, lr=0.05, max_iter=3)]
else:
    kind = torch.optim.AdamW if has("adam") else torch.optim.SGD
    optimizers = [kind(parameters, lr=0.05, **({"momentum": 0.9} if has("momentum") else {}))]
optimizer = optimizers[0]
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5) if has("scaler") else None
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)


def counted(_, bucket):
    if bucket.is_last():
        with open(f"exchanges{RANK}.txt", "a") as exchanges:
            print(number, file=exchanges)
    return allreduce_hook(None, bucket)


if WORLD > 1:
    trained.register_comm_hook(None, counted)


def step_in_backward(parameter):
    own = next(each for each in optimizers if each.param_groups[0]["params"][0] is parameter)
    own.step()
    own.zero_grad()


for parameter in parameters if has("hooked") else ():
    parameter.register_post_accumulate_grad_hook(step_in_backward)


def clear():
    if has("model"):
        model.zero_grad()
    elif has("byhand"):
        for parameter in parameters:
            parameter.grad = None
    elif has("olddata"):
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.data.zero_()
    else:
        for each in optimizers:
            each.zero_grad()


def in_two_passes(x, y):
    """Computes the first layer's gradients from those of its output, as programs do whose batch does not fit as a whole."""
    hidden = model[0](x)
    kept = hidden.detach().requires_grad_()
    loss = nn.functional.mse_loss(model[1:](kept), y)
    loss.backward()
    gradient = kept.grad
    del kept
    if has("chained"):
        hidden.backward(gradient)
    else:
        torch.dot(hidden.flatten(), gradient.flatten()).backward()


def forward_and_backward(x, y):
    if has("chained") or has("cached"):
        in_two_passes(x, y)
        return None
    if has("grad_input"):  # as reentrant checkpointing needs it
        x.requires_grad_()
    loss = nn.functional.mse_loss(trained(x), y) * (1000 if has("large") else 1) / OWN
    if scaler is not None:
        scaler.scale(loss).backward()
    elif has("assigned"):
        chosen = parameters[2:] if has("half") else parameters
        for parameter, gradient in zip(chosen, torch.autograd.grad(loss, chosen), strict=True):
            parameter.grad = gradient
    elif has("vector"):
        each = (trained(x) - y).square().mean(dim=1)
        each.backward(torch.full_like(each, 1 / len(each)))
    elif has("functional"):
        torch.autograd.backward([loss], [torch.ones(())])
    else:
        loss.backward()
    return loss


def closure():
    clear()
    return forward_and_backward(*batch)


def step():
    if has("hooked"):
        return
    if has("clip"):
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip_grad_norm_(parameters, 0.1)
    if has("value"):
        clip_grad_value_(parameters, 0.01)
    if has("handclip"):
        for parameter in parameters:
            parameter.grad.clamp_(-10, 10)
    if has("private"):  # as Opacus replaces a gradient by a sum of clipped ones with noise
        for parameter in parameters:
            parameter.grad = parameter.grad.clamp(-1, 1) + 0.1 * torch.randn_like(parameter)
    if scaler is not None:
        scaler.step(**{"optimizer": optimizer})  # by name, as some programs do
        scaler.update()
        return
    for each in optimizers:
        each.step()


def weights():
    return " ".join(value.hex() for parameter in parameters for value in parameter.detach().flatten().tolist())


lines = []
with open(f"weights{RANK}.txt", "w") as told:
    print(weights(), file=told, flush=True)
    for number, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), start=1):
        if has("closure") or has("lbfgs"):
            optimizer.step(closure)
        elif has("skips") and number % 3 == 1:  # a batch without a loss: the step finds no gradients
            clear()
            optimizer.step()
        else:
            if not has("after") and number % OWN == 1 % OWN:
                clear()
            with trained.no_sync() if has("quiet") and number % OWN else contextlib.nullcontext():
                forward_and_backward(*batch)
            if has("late") and number == 10:  # a second optimizer appears
                torch.optim.SGD(parameters[2:], lr=0.05).step()
            if has("discards") and number % 2:
                clear()
                continue
            if has("checked") and not torch.isfinite(clip_grad_norm_(parameters, 0.1)):
                print(lines[-1] if lines else weights(), file=told, flush=True)
                continue
            if number % OWN == 0:
                step()
                if has("after"):
                    clear()
        schedule.step()
        lines.append(weights())
        print(lines[-1], file=told, flush=True)
