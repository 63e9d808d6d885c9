"""The harness: the part of autotune that runs inside the training process, applies knobs and measures.

It is loaded into every Python process of a trial. `inject/sitecustomize.py`, first on PYTHONPATH, loads this package by
file path under the name `_autotune_harness`, so the program's interpreter does not need autotune, only its own torch >= 2.4
and Python >= 3.9. Nothing here imports anything from the tuner. From here, the tuner imports only modules that need no torch:
`protocol`, `checkpoints`, `cores`, `interval`, `explain.documents`, `knobs.affinity`.

    inject/sitecustomize.py   loads the harness and chains to the sitecustomize it shadows
    boot.py                   waits for `import torch`
    state.py                  this process's session, how torch was imported here, messages to the user
    context.py                the shared facts about the trial; lets the harness's objects find each other
    patches.py                the only place that replaces functions or the class of an nn.Module; also runs the harness's code
                              when a Python module is imported
    guarded_files.py          keeps a trial from overwriting, renaming or removing the user's checkpoints
    checkpoints.py            how a file is recognised as a checkpoint
    warm_server.py            a separate program: imports torch once and starts trials by forking, where that is possible
    libraries.py              which libraries the warm server may import for the program, besides torch
    applied.py, sites.py      apply a file's knobs to a real run, report what took effect, then leave the program alone
    session.py                one per process: makes the objects of the harness and follows the steps
    phases.py                 times the phases of the process; writes the progress lines
    window.py                 warm-up and the measured window: feeds the meter
    last_step.py              how rank 0 tells the other ranks the number of a step, and after which step all ranks exit
    ending.py                 how a process ends and writes its result
    report.py                 assembles the result
    loaders.py, loader.py     which DataLoader feeds the training; how long steps wait for input
    persistent.py             restarts persistent workers where the program expects new ones; notices changes of a data set
    batches.py                counts the samples of a batch or of a module's input
    idle_steps.py             counts steps on batches that the program has kept
    collating.py              whether a collate function uses only the first sample of a batch
    worker_starts.py          how a loader's workers start, and which processes they are
    unpickled.py              loads the harness by its path in a worker that was started without it
    supply.py, worker.py      what the loader's workers can sustain; whether they share the cores with the step
    modules.py, roots.py      which modules train; counts their calls and sets their precision
    wrapping.py               sets the knobs of modules before DistributedDataParallel wraps them
    optimizers.py             detects steps
    writes.py                 detects steps of programs without an optimizer of torch.optim, by writes to parameters
    gradients.py              accumulation and loss scaling (gradient_entry.py: hooks; gradient_state.py: inspects gradients)
    losses.py                 the losses of the first steps
    meter.py                  when warm-up ends and measuring stops (pure)
    interval.py               how far the window's rate may be from the truth (pure)
    blocks.py                 rates of blocks of steps; whether the step time keeps changing (pure)
    process.py                facts and memory of the process
    stack_requests.py         writes the stacks of a process to which the tuner cannot send a signal
    peers.py                  several processes that train one model in shared memory, each at its own pace
    ranks.py                  how long ranks wait for communication, and its bandwidth
    explain/                  mode "explain": passes that show where time and memory go, one file for each pass. base.py defines
                              their interface, passes.py begins and ends them, documents.py defines what they write
    adapters.py               what is known about particular libraries (of images: explain/stages.py; torchao: knobs/float8.py)
    knobs/                    how knobs are set, read back and reported: one handler for each family, listed in registry.py.
                              The handler in module.py uses layout.py (memory formats) and float8.py
"""

from __future__ import annotations

import os
from typing import Optional


def wake(spec_path: str) -> None:
    """Prepares this process. Once torch is imported, a trial applies its knobs and measures; a real run only applies its knobs.

    Args:
        spec_path: the value of the environment variable protocol.SPEC_VARIABLE.
    """
    from . import boot, guarded_files, protocol

    if not protocol.is_real_run(os.environ):  # a real run needs none of the following
        boot.note_start()
        boot.answer_stack_requests()
        boot.sign_in(spec_path)
        boot.keep_records_away()
        guarded_files.keep(os.path.dirname(spec_path))
    boot.wait_for_torch(spec_path)


def join(spec: str) -> None:
    """Prepares a process that has called `autotune.apply`; `spec` is JSON, not a path. torch may already be imported."""
    from . import boot, state

    state.is_called = True
    boot.wait_for_torch(spec)


def step(samples: Optional[float] = None) -> None:
    """Counts one step of training that the program reports itself (`autotune.trial_step`)."""
    from . import state

    if state.session is not None:
        state.session.trial_step(samples)
