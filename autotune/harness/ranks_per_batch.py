"""Finds out how many ranks train on the same batch, because the model or its sequences are split over them.

The model is split by tensor or pipeline parallelism, the sequences by context parallelism.
"""

from __future__ import annotations

from typing import Any

from . import members, process
from .context import TrialContext
from .knobs import step
from .knobs.sharding import sharded_by
from .patches import patches

CONTEXT = "torch.distributed.tensor.experimental._attention"  # module that offers `context_parallel`; absent until torch 2.5


class Sharing:
    """How the model and its data are divided among the ranks.

    Attributes:
        num_stages: number of ranks that hold the stages of a pipeline; 1 without a pipeline.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._num_replicas = 0  # number of ranks over which FSDP2 averages gradients; 0 without FSDP2
        self._num_parts = 1  # number of ranks over which parameters are distributed without FSDP2
        self._num_per_sequence = 1  # number of ranks that each have a part of the same sequences
        self.num_stages = 1
        patches.on_import("torch.distributed.pipelining.stage", self._watch_stages)
        patches.on_import(CONTEXT, self._watch_sequences)

    def _watch_sequences(self, attention: Any) -> None:
        def around(enter: Any) -> Any:
            def context_parallel(mesh: Any, *args: Any, **kwargs: Any) -> Any:
                self._num_per_sequence = mesh.size()
                return enter(mesh, *args, **kwargs)

            return context_parallel

        if hasattr(attention, "context_parallel"):  # otherwise another version of torch
            patches.install(attention, "context_parallel", around)

    def _watch_stages(self, stages: Any) -> None:
        def around(construct: Any) -> Any:
            def __init__(stage: Any, *args: Any, **kwargs: Any) -> None:
                construct(stage, *args, **kwargs)
                self.num_stages = max(self.num_stages, stage.group_size)
                if self.num_stages > 1:  # a stage would scale gradients that the next stage has already scaled
                    self._context.gradients.stand_down(step.PIPELINE)

            return __init__

        if hasattr(stages, "_PipelineStageBase"):  # otherwise another version of torch
            patches.install(stages._PipelineStageBase, "__init__", around)

    def meet(self, module: Any) -> None:
        """Notes over how many ranks a training root is distributed; called before the root's first call."""
        sharded = sharded_by(module)
        self._num_replicas = max([self._num_replicas, *map(_num_replicas, sharded)])
        meshes = [members.attribute(parameter, "device_mesh") for parameter in members.parameters(module) if not sharded]
        self._num_parts = max([self._num_parts, *(mesh.size() for mesh in meshes if mesh is not None)])

    def ranks_per_batch(self) -> int:
        """Returns how many ranks train on the same batch, by the data's sampler or, without one, by how the model is split."""
        ranks = process.group()
        if ranks is None:
            return 1
        groups = [wrapper.process_group for wrapper in self._context.handlers.parallel.living]
        num_ranks, num_averaging = ranks.get_world_size(), max(map(ranks.get_world_size, groups), default=0)
        averaging = self._num_replicas or num_averaging
        if averaging * self._num_per_sequence > num_ranks // (self._num_parts * self.num_stages):
            averaging //= self._num_per_sequence  # gradients are also averaged over the ranks that share a sequence
        num_shares = self._context.loaders.num_shares or averaging
        num_shares = num_shares or num_ranks // (self._num_parts * self.num_stages * self._num_per_sequence)
        return int(num_ranks // num_shares) if num_shares and num_ranks % num_shares == 0 else 1


def _num_replicas(module: Any) -> int:
    """Returns over how many ranks FSDP2 averages a module's own gradients; 0 if unknown."""
    try:
        state = module._get_fsdp_state()  # FSDP2's method, not the program's: FSDP2's class comes first in the MRO
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        info = groups[0].mesh_info
        return int(getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1))
    except AttributeError:  # it has no parameters of its own, or another version of torch keeps them elsewhere
        return 0
