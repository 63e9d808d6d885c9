"""Recognises files as checkpoints. The tuner imports this module, too, so it needs only the standard library."""

from __future__ import annotations

import contextlib
from typing import Any

# How the names of checkpoints usually end. `.distcp` and `.metadata` belong to torch.distributed.checkpoint.
CHECKPOINTS = (
    *(".pt", ".pth", ".pyth", ".th", ".t7", ".ckpt", ".model", ".weights", ".tar", ".safetensors", ".bin", ".pkl", ".pickle"),
    *(".h5", ".hdf5", ".keras", ".npz", ".msgpack", ".zip", ".distcp", ".metadata"),
)
# Those of CHECKPOINTS that are more often the names of data.
DATA = (".tar", ".bin", ".pkl", ".pickle", ".h5", ".hdf5", ".npz", ".msgpack", ".zip")
# A file of `torch.save` begins with this zip header and an entry of this name. Before torch 1.6, it began with this pickled
# number.
TORCH_ZIP, TORCH_ENTRY, TORCH_PICKLE = b"PK\x03\x04", b"/data.pkl", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def is_saved_by_torch(path: Any) -> bool:
    """Whether `torch.save` wrote a file. The file must be a regular one: opening a pipe would wait for another program."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        head = file.read(256)
        return (head.startswith(TORCH_ZIP) and TORCH_ENTRY in head) or head.startswith(TORCH_PICKLE)
    return False
