"""Lists all handlers of knobs. A new family needs a line in `Handlers` and a word in `make`."""

from __future__ import annotations

from typing import NamedTuple

from ..context import TrialContext
from .affinity import AffinityBinder
from .attention import AttentionKnobs
from .device import DeviceKnobs
from .loader import LoaderKnobs
from .memory import MemoryKnobs
from .metrics import MetricKnobs
from .module import ModuleKnobs
from .nccl import NcclKnobs
from .optimizer import OptimizerKnobs
from .parallel import ParallelKnobs
from .process import ProcessKnobs
from .sharding import ShardingKnobs
from .step import StepKnobs
from .transfer import TransferKnobs


class Handlers(NamedTuple):
    """The handlers of a process, in the order in which they are called. If several report a knob, the first one counts."""

    transfer: TransferKnobs  # first: its patches lie below LoaderWatch's patches, and stay when LoaderWatch's are removed
    loader: LoaderKnobs
    memory: MemoryKnobs
    process: ProcessKnobs
    attention: AttentionKnobs
    device: DeviceKnobs
    nccl: NcclKnobs
    module: ModuleKnobs
    parallel: ParallelKnobs
    sharding: ShardingKnobs
    optimizer: OptimizerKnobs
    step: StepKnobs
    metrics: MetricKnobs
    affinity: AffinityBinder


def make(context: TrialContext) -> Handlers:
    """Returns the handlers of this process; the binder was made before torch was imported."""
    return Handlers(
        TransferKnobs(context), LoaderKnobs(context), MemoryKnobs(context), ProcessKnobs(context),
        AttentionKnobs(context), DeviceKnobs(context), NcclKnobs(context), ModuleKnobs(context), ParallelKnobs(context),
        ShardingKnobs(context), OptimizerKnobs(context), StepKnobs(context), MetricKnobs(context), context.binder,
    )  # fmt: skip
