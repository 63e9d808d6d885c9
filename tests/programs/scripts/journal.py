"""Records the training of a program: writes a JSON line for each step, and one whenever an observed fact changes.

The variable JOURNAL names the file. JOURNAL_STEPS is the number of steps after which the program ends (0: never).
"""

import json
import multiprocessing
import os
import time

import torch

# Not emptied when it is opened, because loader workers that are not forked import this module, too.
_file = open(os.environ.get("JOURNAL", os.devnull) + os.environ.get("RANK", ""), "a")  # noqa: SIM115
_last_step = int(os.environ.get("JOURNAL_STEPS", "0"))
_number, _was_away, _seen = 0, False, {}


def step(loss, samples, optimizer=None):
    """Records the end of a step: the time, the bit-exact loss, and the number of samples."""
    global _number, _was_away
    now_s = time.perf_counter()
    _number += 1
    _write({"t": now_s, "loss": float(loss.detach()).hex(), "n": samples, "away": _was_away})
    _was_away = False
    if _number % 8 == 0:
        note(threads=torch.get_num_threads(), workers=len(multiprocessing.active_children()), colour=os.environ.get("COLOUR"))
        if optimizer is not None:
            note(fused=bool(optimizer.param_groups[0].get("fused")))
    if _number == _last_step:
        _file.close()
        for child in multiprocessing.active_children():  # children that are not forked would survive
            child.terminate()
        os._exit(0)


def away():
    """Marks the time between the last step and the next one as not training."""
    global _was_away
    _was_away = True


def inside(inputs, hidden, batch=None):
    """Records the batch size, dtype and memory format inside a model's forward call."""
    note(batch=inputs.shape[0] if batch is None else batch, dtype=str(hidden.dtype).removeprefix("torch."))
    if inputs.dim() == 4:
        note(channels_last=inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous())


@torch.compiler.disable
def note(**facts):
    """Records facts that are new or have changed."""
    if any(name not in _seen or _seen[name] != value for name, value in facts.items()):
        _seen.update(facts)
        _write({"saw": facts})


def _write(line):
    _file.write(json.dumps(line) + "\n")
    _file.flush()  # the program may be killed at any moment
