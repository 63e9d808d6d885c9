"""Anchor-free detector (CenterNet-like) on drawn rectangles. Usage: python detector.py --width 24 --batch-size 16"""

import argparse
import copy
import dataclasses
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import journal
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    steps: int = 100000
    batch_size: int = 16
    workers: int = 1
    size: int = 64
    width: int = 24
    classes: int = 3
    lr: float = 2e-3
    warmup: int = 100
    clip: float = 1.0
    ema: float = 0.999
    val_every: int = 200
    val_batches: int = 4
    ckpt_every: int = 400
    log_every: int = 10
    seed: int = 7
    out: str = "out_det"
    betas: tuple = field(default=(0.9, 0.99))

    @classmethod
    def from_args(cls, argv=None):
        p = argparse.ArgumentParser(description=__doc__)
        for f in dataclasses.fields(cls):
            if f.name != "betas":
                p.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
        return cls(**vars(p.parse_args(argv)))


@dataclass
class Batch:
    """A batch's images, and all their boxes in one tensor with rows (image, class, cx, cy, w, h)."""

    images: torch.Tensor
    boxes: torch.Tensor
    ids: list

    def to(self, device):
        return Batch(self.images.to(device, non_blocking=True), self.boxes.to(device, non_blocking=True), self.ids)

    def pin_memory(self):
        self.images, self.boxes = self.images.pin_memory(), self.boxes.pin_memory()
        return self


class Rectangles(Dataset):
    def __init__(self, cfg, n, offset=0):
        self.cfg, self.n, self.offset = cfg, n, offset

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.default_rng(self.offset + i)
        s = self.cfg.size
        img = rng.normal(0, 0.3, (3, s, s)).astype(np.float32)
        rows = []
        for _ in range(rng.integers(1, 6)):
            c = int(rng.integers(self.cfg.classes))
            w, h = rng.integers(8, 24, 2)
            x, y = rng.integers(0, s - w), rng.integers(0, s - h)
            img[c, y : y + h, x : x + w] += 1.0
            rows.append((c, (x + w / 2) / s, (y + h / 2) / s, w / s, h / s))
        return {"img": torch.from_numpy(img), "boxes": torch.tensor(rows, dtype=torch.float32), "id": f"img{i:05d}"}


def collate(items):
    images = torch.stack([it["img"] for it in items])
    boxes = torch.cat([torch.cat([torch.full((len(it["boxes"]), 1), float(k)), it["boxes"]], 1) for k, it in enumerate(items)])
    return Batch(images, boxes, [it["id"] for it in items])


class Detector(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        w = cfg.width

        def block(i, o, stride):
            return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU(inplace=True))

        self.body = nn.Sequential(block(3, w, 2), block(w, 2 * w, 2), block(2 * w, 2 * w, 1), block(2 * w, 4 * w, 1))
        self.heat = nn.Conv2d(4 * w, cfg.classes, 1)
        self.box = nn.Conv2d(4 * w, 4, 1)
        nn.init.constant_(self.heat.bias, -2.0)

    def forward(self, x):
        f = self.body(x)
        heat, box = self.heat(f), self.box(f)
        if self.training:
            journal.inside(x, heat)
        else:
            journal.note(held_out=[len(x), str(heat.dtype)])
        return heat, box


class Ema:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.state_dict().values(), model.state_dict().values(), strict=True):
            if e.dtype.is_floating_point:
                e.lerp_(p, 1 - self.decay)
            else:
                e.copy_(p)


def loss_fn(cfg, heat, box, boxes):
    gh, gw = heat.shape[-2:]
    target = torch.zeros_like(heat)
    n, c = boxes[:, 0].long(), boxes[:, 1].long()
    gx, gy = (boxes[:, 2] * gw).long().clamp(max=gw - 1), (boxes[:, 3] * gh).long().clamp(max=gh - 1)
    target[n, c, gy, gx] = 1.0
    p = torch.sigmoid(heat.float())
    focal = F.binary_cross_entropy_with_logits(heat.float(), target.float(), reduction="none") * (target.float() - p).abs() ** 2
    reg = F.l1_loss(box[n, :, gy, gx].float(), boxes[:, 2:])
    return focal.sum() / max(len(boxes), 1) + reg


@torch.no_grad()
def validate(cfg, model, loader, device):
    model.eval()
    total, seen = 0.0, 0
    for k, batch in enumerate(loader):
        if k == cfg.val_batches:
            break
        batch = batch.to(device)
        total += loss_fn(cfg, *model(batch.images), batch.boxes).item() * len(batch.ids)
        seen += len(batch.ids)
    return total / seen


def main():
    cfg = Config.from_args()
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = Path(cfg.out)
    out.mkdir(exist_ok=True)
    train = DataLoader(
        Rectangles(cfg, 4096),
        cfg.batch_size,
        shuffle=True,
        num_workers=cfg.workers,
        collate_fn=collate,
        drop_last=True,
        persistent_workers=cfg.workers > 0,
    )
    val = DataLoader(Rectangles(cfg, 256, offset=10**6), 32, collate_fn=collate)
    model = Detector(cfg).to(device)
    ema = Ema(model, cfg.ema)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=cfg.lr, betas=cfg.betas
    )
    sched = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / cfg.warmup) * 0.5 * (1 + math.cos(math.pi * min(1, s / cfg.steps)))
    )
    print(f"{sum(p.numel() for p in model.parameters()) / 1e3:.0f}k parameters, batch={train.batch_size}")
    print(f"cwd={os.getcwd()}, argv={sys.argv[1:]}")
    step, mark, best = 0, (time.perf_counter(), 0), float("inf")
    while step < cfg.steps:
        for batch in train:
            model.train()
            batch = batch.to(device)
            heat, box = model(batch.images)
            loss = loss_fn(cfg, heat, box, batch.boxes)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.step()
            sched.step()
            ema.update(model)
            journal.step(loss, len(batch.ids), optimizer)
            step += 1
            if step % cfg.log_every == 0:
                now = time.perf_counter()
                rate = (step - mark[1]) * len(batch.ids) / (now - mark[0])
                mark = (now, step)
                print(f"\rstep {step:6d} loss {loss.item().hex()} norm {norm:.3f} lr {sched.get_last_lr()[0]:.2e}", end=" ")
                print(f"{rate:8.1f} img/s t {now:.3f}", end="", flush=True)
            if step % cfg.val_every == 0:
                journal.away()
                v = validate(cfg, ema.model, val, device)
                print(f"\nval {step} loss {v:.4f}", flush=True)
                best = min(best, v)
            if step % cfg.ckpt_every == 0:
                journal.away()
                torch.save(
                    {
                        "model": model.state_dict(),
                        "ema": ema.model.state_dict(),
                        "opt": optimizer.state_dict(),
                        "step": step,
                        "cfg": dataclasses.asdict(cfg),
                    },
                    out / "last.pt",
                )
            if step >= cfg.steps:
                break
    print(f"\ndone, best {best:.4f}")


if __name__ == "__main__":
    main()
