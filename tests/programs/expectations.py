"""Expectations for each program in `scripts/`: what the harness detects, which knobs take effect, and why others do not."""

from dataclasses import dataclass, field
from typing import Any

from autotune.harness.protocol import NOT_APPLICABLE, OVERRIDDEN

# knob -> (fact in the journal that shows it, {value of the knob: value of the fact} for values that differ).
SEEN_AS: dict[str, tuple[str, dict[Any, Any]]] = {
    "loader.batch_size": ("batch", {}),
    "loader.num_workers": ("workers", {}),
    "precision.amp": ("dtype", {"off": "float32", "bf16": "bfloat16", "fp16": "float16"}),
    "layout.channels_last": ("channels_last", {}),
    "optimizer.implementation": ("fused", {"fused": True}),
    "threads.intra": ("threads", {}),
    "env.COLOUR": ("colour", {}),
    "step.metrics_sync_interval": ("reads_every", {}),
}
PYTHON = ("{python}",)
THREADS: dict[str, Any] = {"threads.intra": 2}
LOADER: dict[str, Any] = {"loader.batch_size": 6, "loader.num_workers": 1, "loader.persistent_workers": True}
MODEL: dict[str, Any] = {"precision.amp": "bf16", "optimizer.implementation": "fused"}
USUAL = {"env.COLOUR": "red", **LOADER, **MODEL}
IMAGES = {**USUAL, "layout.channels_last": True}
BLOCKS = {key: value for key, value in IMAGES.items() if key != "precision.amp"}
BLOCKS |= {"memory.activation_checkpointing": True, "optimizer.set_to_none": False}
NO_LOADER = (NOT_APPLICABLE, "no DataLoader feeds the optimizer's steps")
NO_LAYOUT = (NOT_APPLICABLE, "no module that trains has convolution weights of four dimensions")


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program, and what the harness should detect in it.

    Attributes:
        name: the name of the row.
        argv: the command after `starter`. `{scripts}` and `{folder}` are replaced.
        starter: the beginning of the command, usually the interpreter. `{python}` is replaced.
        plain: the command after the interpreter that replaces `starter` and `argv` in the plain run; if empty, `argv` is used.
        ranks: number of processes that train together.
        batch_size: the training loader's batch size; None if there is no loader or it has no `batch_size`.
        has_loader: whether a DataLoader feeds the steps.
        modules: class names of the modules that train.
        optimizers: class names, in the order of construction.
        samples: the most frequent number of samples in a step; None if it varies.
        unit, source: the counted unit, and the beginning of `unit_source`.
        blocked: knob -> part of the reason why it cannot be turned, according to the run without knobs.
        knobs: the knobs of the second run.
        refused: knob -> (status, part of the reason), for knobs that do not take effect. All other knobs take effect.
        saw: further facts in the journal of the run with knobs, beyond those in `SEEN_AS`.
        uncounted: number of first steps that do not count, because the harness has not yet learned what a step is.
    """

    name: str
    argv: tuple[str, ...]
    starter: tuple[str, ...] = PYTHON
    plain: tuple[str, ...] = ()
    ranks: int = 1
    batch_size: int | None = 12
    has_loader: bool = True
    modules: tuple[str, ...] = ("Net",)
    optimizers: tuple[str, ...] = ("SGD",)
    samples: int | None = 12
    unit: str = "samples"
    source: str = "loader"
    blocked: dict[str, str] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=lambda: USUAL)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    saw: dict[str, Any] = field(default_factory=dict)
    uncounted: int = 0


NO_STEP = "no optimizer of torch.optim stepped"
BY_HAND: dict[str, Any] = {
    "optimizers": (),
    "blocked": {"optimizer.implementation": NO_STEP},
    "knobs": IMAGES,
    "refused": {"optimizer.implementation": (NOT_APPLICABLE, NO_STEP)},
    "uncounted": 4,
}


def script(name: str, *words: str, **expected: Any) -> Program:
    """Returns the row of a script that is started as `python NAME.py WORDS`."""
    return Program(name="_".join((name, *words)), argv=(f"{{scripts}}/{name}.py", *words), **expected)


TORCHRUN = (*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
SILENT_STREAM = "not seen to call get_worker_info()"
PROGRAMS = (
    script("plain", batch_size=16, samples=16, knobs={**IMAGES, **THREADS}),
    script(
        "own_batches",
        has_loader=False,
        batch_size=None,
        modules=("LanguageModel",),
        optimizers=("AdamW",),
        samples=512,
        unit="tokens",
        source="forward calls",
        blocked={**dict.fromkeys(LOADER, NO_LOADER[1]), "layout.channels_last": NO_LAYOUT[1]},
        knobs=IMAGES,
        refused={**dict.fromkeys(LOADER, NO_LOADER), "layout.channels_last": NO_LAYOUT},
    ),
    script("gan", modules=("Sequential", "Critic"), optimizers=("Adam", "Adam"), saw={"both_fused": [True, True]}),
    script("accumulate", optimizers=("AdamW",), samples=36),
    script(
        "closure",
        optimizers=("LBFGS",),
        blocked={"optimizer.implementation": "LBFGS has no implementations"},
        refused={"optimizer.implementation": (NOT_APPLICABLE, "LBFGS has no implementations to choose from")},
    ),
    script(
        "own_precision",
        knobs={**USUAL, "precision.amp": "off"},
        saw={"outputs": "torch.float32"},
    ),
    script(
        "own_compile",
        modules=("OptimizedModule(Net)",),
        blocked={"compile.mode": "the program compiles its modules itself"},
        knobs={**MODEL, "loader.batch_size": 6, "compile.mode": "default"},
        refused={"compile.mode": (OVERRIDDEN, "the program compiles this module itself")},
        # There are two graphs even without the harness, because the program's own hook breaks the graph.
        saw={"graphs": 2, "names": ["body.bias", "body.weight", "head.bias", "head.weight"]},
    ),
    script("late_model", optimizers=("Adam",), knobs=IMAGES, saw={"kept_alive": 0}),
    script(
        "averaged",
        knobs=IMAGES,
        saw={"copies_are_right": [True, True], "copies_differ": True, "copy_dtype": "torch.float32"},
    ),
    script("fine_tuned", knobs=IMAGES),
    script(
        "policy",
        has_loader=False,
        batch_size=None,
        samples=32,
        source="forward calls",
        modules=("Policy",),
        optimizers=("Adam",),
        blocked=dict.fromkeys(LOADER, NO_LOADER[1]),
        refused=dict.fromkeys(LOADER, NO_LOADER),
    ),
    script("hand_written", "data", **BY_HAND),
    script("hand_written", "no_grad", **BY_HAND),
    script("hand_written", "gathered", **{**BY_HAND, "samples": 36, "uncounted": 3}),
    script("hand_written", "class", **BY_HAND),
    script("evaluating", knobs=IMAGES, saw={"held_out": [40, "torch.float32"]}),
    script(
        "stream",
        "shared",
        blocked=dict.fromkeys(("loader.num_workers", "loader.persistent_workers"), SILENT_STREAM),
        refused=dict.fromkeys(("loader.num_workers", "loader.persistent_workers"), (NOT_APPLICABLE, SILENT_STREAM)),
        knobs={**USUAL, "loader.num_workers": 2},
        saw={"each_sample_once": True},
    ),
    script("stream", "sharded", knobs={**USUAL, "loader.num_workers": 2}, saw={"each_sample_once": True}),
    script(
        "buckets",
        batch_size=None,
        optimizers=("Adam",),
        samples=None,
        blocked={"loader.batch_size": "its own batch sampler (Buckets) without a batch_size"},
        refused={"loader.batch_size": (NOT_APPLICABLE, "its own batch sampler (Buckets) without a batch_size")},
    ),
    # With the word `open`, the script overrides no methods. Both rows must give the same results.
    *(script("guarded", *words, optimizers=("Descent",), knobs=BLOCKS) for words in ((), ("open",))),
    script("structures", saw={"outputs": "torch.float32"}),
    script("time_major", optimizers=("Adam",)),
    script("packed", "collated", batch_size=8, samples=8, optimizers=("Adam",)),
    script(
        "packed",
        "ready",
        batch_size=None,
        samples=None,
        unit="tokens",
        optimizers=("Adam",),
        blocked={"loader.batch_size": "the program batches by itself"},
        refused={"loader.batch_size": (NOT_APPLICABLE, "the program batches by itself (batch_size=None)")},
    ),
    Program(
        name="hf_trainer",
        argv=("{scripts}/hf_trainer.py", "{folder}"),
        modules=("BertForSequenceClassification",),
        optimizers=("AdamW",),
        knobs={**USUAL, "step.metrics_sync_interval": 10},
        saw={"filters": False},
    ),
    script("accelerated", optimizers=("AdamW",), samples=24, knobs=IMAGES),
    script(
        "lightning_module",
        batch_size=16,
        samples=16,
        modules=("Sequential",),
        optimizers=("Adam",),
        knobs={**IMAGES, "step.metrics_sync_interval": 8},
        saw={"outputs": "torch.float32"},
    ),
    script(
        "ddp",
        starter=TORCHRUN,
        ranks=2,
        batch_size=16,
        samples=16,
        modules=("DistributedDataParallel(Sequential)",),
        knobs=IMAGES,
    ),
    Program(
        name="bystander_from_bash",
        starter=("bash",),
        argv=("{scripts}/train.sh", "--out", "{folder}/made/here", "--batch-size=24"),
        plain=("{scripts}/bystander.py", "--out", "{folder}/made/here", "--batch-size=24"),
        batch_size=24,
        samples=24,
        modules=("Sequential",),
        optimizers=("Adam",),
        knobs={**USUAL, **THREADS},
        saw={"child_said": True, "handlers": [True, True], "argv": ["--out"], "whole": ["Sequential", True]},
    ),
    Program(
        name="detector",
        argv=("{scripts}/detector.py", "--width", "4", "--size", "32", "--val-every", "30"),
        modules=("Detector",),
        optimizers=("AdamW",),
        batch_size=16,
        samples=16,
        knobs={**IMAGES, "loader.num_workers": 2},
        saw={"held_out": [32, "torch.float32"]},
    ),
    script(
        "molecules",
        batch_size=None,
        samples=None,
        optimizers=("AdamW", "SparseAdam"),
        blocked={"loader.batch_size": "its own batch sampler (NodeBudget) without a batch_size"},
        refused={"loader.batch_size": (NOT_APPLICABLE, "its own batch sampler (NodeBudget) without a batch_size")},
    ),
    Program(
        name="td3",
        argv=("-m", "td3.train", "--hidden", "64"),
        has_loader=False,
        batch_size=None,
        samples=256,
        source="forward calls",
        modules=("Actor", "Critic"),
        optimizers=("Adam", "Adam"),
        blocked=dict.fromkeys(LOADER, NO_LOADER[1]),
        refused=dict.fromkeys(LOADER, NO_LOADER),
    ),
    Program(name="package", argv=("-m", "pkg.train"), optimizers=("AdamW",)),
)
