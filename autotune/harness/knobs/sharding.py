"""Verifies whether a model is trained with DDP or FSDP, and sets when sharded modules free their gathered parameters.

A program that uses FSDP2 calls `torch.distributed.fsdp.fully_shard` before its first forward pass. After that call and before
the pass, FSDP2's `set_reshard_after_forward` can change resharding. The change is verified between forward and backward: at
that point, a module that reshards has only its shards registered as parameters, and any other module has whole parameters.

The harness does not change whether a model is sharded, because that determines the optimizer's state and the checkpoints. If
the program has an argument for it, that argument is set on the command line and verified here.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Dict, List, Optional

from .. import members
from ..context import TrialContext
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler
from .parallel import ALONE, STRATEGY

RESHARD = "parallel.reshard_after_forward"
KEYS = (STRATEGY, RESHARD)
DDP, FSDP, NEITHER = "ddp", "fsdp", "neither"
HOMES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")  # where FSDP2's class is; the second until torch 2.5
RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # FSDP 1's names
ARGUMENT = (
    "autotune does not switch between DDP and FSDP itself, since that changes what the optimizer holds and what the program "
    "saves. If an argument of the program chooses between them, write {parallel.strategy=ddp} in the command as its value"
)
NOT_SHARDED = "no module is sharded by torch.distributed.fsdp.fully_shard"
WHOLE = "the model is sharded as a single unit, and the backward pass needs all of it right after the forward pass"
FIRST = "FullyShardedDataParallel (FSDP 1) sets this once, when it is constructed (sharding_strategy)"
OLD = "this version of torch cannot change resharding after fully_shard"
PARTLY = "the program reshards its parameters over only some of the ranks"


class ShardingKnobs(KnobHandler):
    """Handles the sharded modules of this process."""

    keys = KEYS

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._knobs, self._passed = self.asked, context.spec.passed
        self._targets: List[Any] = []  # weak references to the modules that may reshard after the forward pass
        self._sizes: Dict[int, int] = {}  # id of such a module -> number of ranks that hold its shards
        self._fsdp1_reshards: Optional[bool] = None  # whether FSDP 1 reshards; None without it
        self._seen: Dict[int, Any] = {}  # id of a module -> whether it had resharded between forward and backward, or PARTLY
        self._why = NOT_SHARDED
        self.is_found = False

    def meet(self, module: Any) -> None:
        """Notes a training root's sharded modules and sets the knob; called before the root's first call."""
        self._meet_fsdp1(module)
        sharded = [each for each in sharded_by(module) if _mesh_size(each)]
        if not sharded:
            return
        self.is_found = True
        below = {id(inner) for each in sharded for inner in members.modules(each) if inner is not each}
        outermost = [each for each in sharded if id(each) not in below]
        # The backward pass needs a single outermost module right after the forward pass, so torch keeps it whole.
        targets = [each for each in sharded if len(outermost) > 1 or each is not outermost[0]]
        asked, self._why = self._knobs.get(RESHARD), "" if targets or self._targets else WHOLE
        for each in targets:
            if asked is not None and not hasattr(type(each), "set_reshard_after_forward"):
                self._why = OLD
                return
            self._targets.append(weakref.ref(each))
            self._sizes[id(each)] = _mesh_size(each)
            if asked is not None:
                # This is FSDP2's method even if the program's class has a method of this name: FSDP2 comes first in the MRO.
                each.set_reshard_after_forward(bool(asked), recurse=False)

    def _meet_fsdp1(self, module: Any) -> None:
        for each in members.modules(module):
            if type(each).__name__ == "FullyShardedDataParallel":  # reading attributes of other modules may fail
                strategy = getattr(members.attribute(each, "sharding_strategy"), "name", None)
                self.is_found, self._fsdp1_reshards, self._why = True, strategy in RESHARDING, FIRST

    def look(self) -> None:
        """Notes which modules have resharded; called between a training root's forward and backward pass in the first steps."""
        for ref in self._targets:
            module = ref()
            if module is not None:
                size = _mesh_size(module)
                self._seen[id(module)] = bool(size) if size in (0, self._sizes[id(module)]) else PARTLY

    def observe(self) -> Dict[str, Any]:
        """Returns knob key -> the program's own value.

        Without DDP and FSDP, that is {STRATEGY: NEITHER} if the command line sets the strategy, otherwise {}.
        """
        if not self.is_found:
            neither = {STRATEGY: NEITHER} if STRATEGY in self._passed else {}
            return {STRATEGY: DDP} if self._context.handlers.parallel.observe() else neither
        return {STRATEGY: FSDP, **({} if self._resharded is None else {RESHARD: self._resharded})}

    @property
    def _resharded(self) -> Optional[bool]:
        seen = list(self._seen.values())
        return any(value is not False for value in seen) if seen else self._fsdp1_reshards

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this program."""
        if self._context.world_size == 1:
            return dict.fromkeys(KEYS, ALONE)
        if STRATEGY in self._passed:
            return {}  # nothing is ruled out: with another strategy, the program has other modules
        partly = PARTLY if PARTLY in self._seen.values() else ""
        why = self._why or partly
        return {STRATEGY: ARGUMENT, **({RESHARD: why} if why else {})}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        if key == RESHARD:
            return self._verify_resharding(bool(asked))
        own, why = self.observe().get(STRATEGY), ARGUMENT if self._context.world_size > 1 else ALONE
        return KnobReport(APPLIED, "", own) if own == asked else KnobReport(NOT_APPLICABLE, why, own)

    def _verify_resharding(self, asked: bool) -> KnobReport:
        seen = list(self._seen.values()) or [self._fsdp1_reshards]
        if seen == [None]:
            return KnobReport(NOT_APPLICABLE, self._why or NOT_SHARDED)
        odd = [value for value in seen if value is not asked]
        if not odd:
            return KnobReport(APPLIED, "", asked)
        if self._why:
            return KnobReport(NOT_APPLICABLE, self._why, self._resharded)
        return KnobReport(OVERRIDDEN, f"{len(odd)} of {len(seen)} sharded modules have another value", self._resharded)


def sharded_by(module: Any) -> List[Any]:
    """Returns the modules within a module that FSDP2 shards."""
    kinds = tuple(kind for home in HOMES if (kind := getattr(sys.modules.get(home), "FSDPModule", None)) is not None)
    return [each for each in members.modules(module) if isinstance(each, kinds)] if kinds else []


def _mesh_size(module: Any) -> int:
    """Returns over how many ranks a module's parameters are currently sharded; 0 if they are whole."""
    for parameter in members.parameters(module):
        for dimension, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard():
                return int(parameter.device_mesh.size(dimension))
    return 0
