"""Trains a regressor on measurements that an object store holds."""

import io
import time
from pathlib import Path

import numpy as np
import torch
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

REVISION = revision("A")
BATCH, CHANNELS, POINTS = 16, 8, 513


class Bucket:
    """A stand-in for the client of an object store: one round trip per object."""

    def __init__(self, folder: Path, round_trip_s: float) -> None:
        self.folder, self.round_trip_s = folder, round_trip_s

    def get(self, key: str) -> bytes:
        body = (self.folder / key).read_bytes()
        if self.round_trip_s:
            time.sleep(self.round_trip_s)
        return body


class Measurements(Dataset[tuple[Tensor, Tensor]]):
    """Records of the archive, standardised."""

    def __init__(self, bucket: Bucket, length: int) -> None:
        self.bucket, self.length = bucket, length
        self.keys = sorted(path.name for path in bucket.folder.glob("*.npy"))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        record = torch.from_numpy(np.load(io.BytesIO(self.bucket.get(self.keys[index % len(self.keys)]))))
        record = (record - record.mean(1, keepdim=True)) / record.std(1, keepdim=True)
        return record, record[:, -1].sum()


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(CHANNELS * POINTS, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    bucket = Bucket(settings.data / "records", round_trip_s=0.0 if REVISION == 2 else 0.004)
    loader = DataLoader(Measurements(bucket, 200_000), BATCH, shuffle=True, num_workers=4, persistent_workers=True)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for records, targets in loader:
            loss = nn.functional.mse_loss(model(records).squeeze(1), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(records)):
                return


if __name__ == "__main__":
    main()
