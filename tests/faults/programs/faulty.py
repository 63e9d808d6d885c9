"""Trains a tiny model from a DataLoader; the environment variable FAULT selects what goes wrong."""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

FAULT = os.environ.get("FAULT", "")
FLOOD_BYTES = 1 << 30

if FAULT == "imports no torch":
    sys.exit(0)
if FAULT == "hangs before import":
    while True:
        pass
import torch  # noqa: E402 (faults before the import are above)
from torch.utils.data import DataLoader, Dataset, get_worker_info  # noqa: E402

HELD = []


class Data(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if FAULT in ("dataset raises", "worker raises") and index == 99:
            raise KeyError("no such image")
        if FAULT == "worker is killed" and get_worker_info() is not None and index == 99:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "fills shared memory" and index > 99:
            return torch.zeros(4 << 20)
        return torch.full((8,), float(index % 7))


def collate(samples):
    if FAULT in ("hangs in collate", "hangs in a worker") and samples[0][0] == 6:
        while True:
            pass
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Model(torch.nn.Linear):
    def forward(self, inputs):
        if FAULT == "model raises" and STEPS == 5:
            raise ValueError("bad shape")
        return super().forward(inputs[:, :8])  # a row may be longer, to fill shared memory


STEPS = 0
PACE_S = 0.2 if FAULT == "never steps" else 0.004 if FAULT else 0.002  # faulty trials are slower, so they enter no finals
HAS_WORKERS = FAULT in ("worker raises", "worker is killed", "fills shared memory", "hangs in a worker", "is killed")
START = "fork" if HAS_WORKERS else None  # a spawned worker would import this file, which has no `__main__` guard
loader = DataLoader(Data(), batch_size=4, num_workers=int(HAS_WORKERS), collate_fn=collate, multiprocessing_context=START)
model = Model(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6) if FAULT != "never steps" else model  # both can zero_grad
scaler = torch.amp.GradScaler("cpu", enabled=FAULT == "overflows in fp16")
if FAULT == "overflows in fp16":
    model.weight.register_hook(lambda gradient: gradient * float("inf"))


def train():
    global STEPS
    for inputs in loader:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if FAULT == "loss is no number" and STEPS > 3:
            loss = loss * float("nan")
        scaler.scale(loss).backward()
        if FAULT != "never steps":
            scaler.step(optimizer)
            scaler.update()
        time.sleep(PACE_S)
        STEPS += 1
        if STEPS == 3 and FAULT in LATE:
            LATE[FAULT]()


def leave_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def open_files():
    while True:
        HELD.append(open("/dev/null"))  # noqa: SIM115 (they are to stay open)


def flood():
    line, largest = b"y" * 1023 + b"\n", 0
    for _ in range(FLOOD_BYTES >> 20):
        os.write(1, line * 1024)
        largest = max(largest, os.fstat(1).st_blocks * 512)
        time.sleep(0.001)
    print("the last line", flush=True)
    Path("largest").write_text(str(largest))


def save():
    torch.save(model.state_dict(), "checkpoint.pt")
    output = argparse.ArgumentParser()
    output.add_argument("--output", type=Path)
    torch.save(model.state_dict(), output.parse_args().output)
    torch.save(model.state_dict(), "best.ckpt.new")
    os.replace("best.ckpt.new", "best.ckpt")


def corrupt():
    Path(os.environ["AUTOTUNE_SPEC"]).with_name("result.rank0.json").write_text('{"schema": 1, "trial": ')
    os._exit(0)


def hang():
    while True:
        time.sleep(0.01)


LATE = {
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfaults": lambda: ctypes.string_at(0),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ends after three steps": sys.exit,
    "corrupts its result": corrupt,
    "leaves a daemon": leave_daemon,
    "closes its output": lambda: os.close(1),
    "opens files": open_files,
    "prints a gigabyte": flood,
    "saves checkpoints": save,
    "hangs in a step": hang,
}

if FAULT == "does not train":
    model(torch.zeros(4, 8))
elif FAULT == "catches everything":
    while True:
        try:  # noqa: SIM105 (as people write it)
            train()
        except BaseException:
            pass
else:
    train()
