"""The programs that run while parts of a study are killed: those of the trials, and one of another user in the same folder."""

from __future__ import annotations

from tests.support.stub_programs import PRELUDE

RATIO = 1.5  # speed of the stub with bf16, divided by its speed without
# Trains with torch.
TORCH = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
rank = int(os.environ.get("RANK", 0))

def save(*_):
    if rank == 0:
        torch.save(model.state_dict(), "named.pt")
        torch.save(model.state_dict(), "new.tmp")
        os.replace("new.tmp", "replaced.pt")
    if _:
        sys.exit()

signal.signal(signal.SIGTERM, save)
saved_s = 0.0
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(20000, 64))
if __name__ == "__main__":
    for epoch in range(100000):
        for (batch,) in DataLoader(data, batch_size=32, num_workers=1):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if time.monotonic() - saved_s > 0.3:
                save()
                saved_s = time.monotonic()
"""
# Saves a number, alternately in place and by renaming a new file. Prints each number that another program has overwritten.
OTHER = """
import os, pathlib, time
path, number = pathlib.Path("audio_best.pt"), 0
path.write_text("0")
while True:
    time.sleep(0.2)
    if path.read_text() != str(number):
        print(f"checkpoint {number} of another program: {path.read_text()[:20]!r}", flush=True)
    number += 1
    if number % 2:
        path.write_text(str(number))
    else:
        pathlib.Path("audio.tmp").write_text(str(number))
        os.replace("audio.tmp", path)
"""
# Trains nothing and needs a few hundredths of a second of CPU, so that many trials finish between two kills. bf16 makes it 1.5
# times as fast. It has a worker. With one rank, it makes a segment of shared memory, as torch does. It saves in place only:
# without the harness, nothing keeps a trial from renaming another file over a checkpoint.
STUB = f"""{PRELUDE}
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
segment = "/dev/shm/torch_%d_%d_0" % (os.getpid(), time.monotonic_ns())

def save(*signalled):
    if rank == 0:
        for name in ("named.pt", "replaced.pt"):
            open(name, "w").write("a trial's")
    if signalled:
        os._exit(143)

def work():  # like a loader worker, it notices late that its parent has died
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)

if sys.argv[1:] == ["worker"]:
    work()
    sys.exit()
signal.signal(signal.SIGTERM, save)
if rank == 0:
    progress("steady", 5)
if size == 1:
    open(segment, "w").write("shared")
worker = subprocess.Popen([sys.executable, "-S", sys.argv[0], "worker"])
save()
time.sleep(0.1 + 0.4 * int.from_bytes(os.urandom(1), "big") / 256)
rate = 300.0 * ({RATIO} if spec["knobs"].get("precision.amp") == "bf16" else 1.0)
wobble = [1.0, 0.99, 1.01, 0.995, 1.005, 1.0]
window = {{"steps": 20, "seconds": 2.0, "samples": 2.0 * rate, "rate_per_s": rate,
          "block_rates_per_s": [rate * w for w in wobble], "half_width_frac": 0.01, "is_steady": True, "reason": ""}}
observed = {{"loader.batch_size": 32, "loader.num_workers": 0, "precision.amp": "off", "layout.channels_last": False,
            "threads.intra": 2}}
worker.kill()
worker.wait()
if size == 1:
    os.unlink(segment)
result(rank, size, window=window, throughput_per_s=rate, unit="samples", target=[], observed=observed,
       phases_s={{"spawn": 0.1}}, facts={{"torch": "2.14.1", "device": "cpu", "isa": ["amx_bf16"]}})
"""
# Starts the stub's ranks as torchrun does: `launch.py NUM_RANKS COMMAND ...`. If one fails, it ends the others.
LAUNCH = """
import os, signal, subprocess, sys, time

ranks = []
for rank in range(int(sys.argv[1])):
    here = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": sys.argv[1]}
    ranks.append(subprocess.Popen(sys.argv[2:], env=here))

def end(*_):
    failed = next((rank.poll() for rank in ranks if rank.poll()), 1)
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.wait()
    if failed == -signal.SIGKILL:  # torchrun says so in a report that autotune reads
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
while not any(rank.poll() for rank in ranks):
    if all(rank.poll() == 0 for rank in ranks):
        sys.exit()
    time.sleep(0.02)
end()
"""
