"""Message passing on random molecules; batches by a node budget; sparse atom embedding with its own optimizer."""

import os
import random
import time

import journal
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, Sampler

STEPS = int(os.getenv("STEPS", "100000"))
NODES = int(os.getenv("NODES", "300"))
ACCUM = 2
torch.set_num_threads(1)  # as some clusters demand
torch.manual_seed(1)


class Molecules(Dataset):
    def __init__(self, n=3000):
        r = random.Random(5)
        self.sizes = [r.randint(10, 60) for _ in range(n)]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = self.sizes[i]
        atoms = torch.randint(0, 500, (n,), generator=g)
        edges = torch.randint(0, n, (2, 3 * n), generator=g)
        return atoms, edges, (atoms % 7).float().mean()


class NodeBudget(Sampler):
    """Yields lists of indices whose graphs have at most `budget` nodes in total, in a new order each epoch."""

    def __init__(self, sizes, budget, seed=0):
        self.sizes, self.budget, self.seed, self.epoch = sizes, budget, seed, 0

    def __iter__(self):
        order = list(range(len(self.sizes)))
        random.Random(self.seed + self.epoch).shuffle(order)
        self.epoch += 1
        batch, nodes = [], 0
        for i in order:
            if nodes + self.sizes[i] > self.budget:
                yield batch
                batch, nodes = [], 0
            batch.append(i)
            nodes += self.sizes[i]
        yield batch


def collate(items):
    atoms, edges, ys, owner, at = [], [], [], [], 0
    for k, (a, e, y) in enumerate(items):
        atoms.append(a)
        edges.append(e + at)
        owner.append(torch.full((len(a),), k))
        ys.append(y)
        at += len(a)
    return {"atoms": torch.cat(atoms), "edge_index": torch.cat(edges, 1), "batch": torch.cat(owner), "y": torch.stack(ys)}


class Net(nn.Module):
    def __init__(self, dim=32, layers=3):
        super().__init__()
        self.atoms = nn.Embedding(500, dim, sparse=True)
        self.msg = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(layers))
        self.upd = nn.ModuleList(nn.GRUCell(dim, dim) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, data):
        h = self.atoms(data["atoms"])
        src, dst = data["edge_index"]
        for msg, upd in zip(self.msg, self.upd, strict=True):
            m = torch.relu(msg(torch.cat([h[src], h[dst]], -1)))
            journal.inside(data["atoms"], m, batch="many")
            h = upd(torch.zeros_like(h, dtype=m.dtype).index_add_(0, dst, m).to(h.dtype), h)
        pooled = torch.zeros(len(data["y"]), h.shape[1], dtype=h.dtype).index_add_(0, data["batch"], h)
        return self.out(pooled / torch.bincount(data["batch"])[:, None]).squeeze(-1)


loader = DataLoader(
    Molecules(),
    batch_sampler=NodeBudget(Molecules().sizes, NODES),
    collate_fn=collate,
    num_workers=2,
    prefetch_factor=4,
    multiprocessing_context="fork",  # this file has no main guard
)
net = Net()
dense = torch.optim.AdamW([p for n, p in net.named_parameters() if n != "atoms.weight"], lr=1e-3)
sparse = torch.optim.SparseAdam([net.atoms.weight], lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(dense, 1e-3, total_steps=STEPS + 1)

updates, graphs, told, t0, running, k = 0, 0, 0, time.perf_counter(), 0.0, 0
while updates < STEPS:
    for data in loader:
        loss = nn.functional.huber_loss(net(data).float(), data["y"])
        (loss / ACCUM).backward()
        running, k, graphs = running + loss.item(), k + 1, graphs + len(data["y"])
        if k % ACCUM:
            continue
        for opt in (dense, sparse):
            opt.step()
            opt.zero_grad()
        scheduler.step()
        journal.step(loss, graphs - told, dense)
        told = graphs
        updates += 1
        if updates % 10 == 0:
            now = time.perf_counter()
            print(
                f"update {updates} loss {loss.item().hex()} mean {running / 20:.4f} {graphs / (now - t0):.1f} graphs/s "
                f"nodes={len(data['atoms'])} threads={torch.get_num_threads()} t {now:.3f}"
            )
            running, graphs, told, t0 = 0.0, 0, 0, now
        if updates >= STEPS:
            break
