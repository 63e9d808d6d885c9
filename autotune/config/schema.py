"""The configuration as dataclasses: every key with its type, its default and its meaning."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.harness.protocol import MeasureRules
from autotune.knobs.catalogue import CATALOGUE
from autotune.records import THROUGHPUT, Tier

SAMPLERS = ("rates", "tpe", "gp", "random", "grid")
LOCAL, SLURM, RAY = "local", "slurm", "ray"
LAUNCHERS = (LOCAL, SLURM, RAY)
DEVICES = ("auto", "cuda", "cpu")
AUTO, OFF = "auto", "off"
WARM = (AUTO, OFF)
SOURCES = ("torchvision", "timm", "transformers", "builtin")
DATA = ("photos", "fake_cifar", "folder", "text", "tabular", "synthetic")
OPTIMIZERS = ("sgd", "adamw")


def pins_of(group: str) -> type[Any]:
    """Returns the dataclass of a knob group: one optional field per knob, None meaning "not pinned"."""
    knobs = {key.partition(".")[2]: knob for key, knob in CATALOGUE.items() if key.startswith(f"{group}.")}
    fields = [(name, knob.type | None, field(default=None)) for name, knob in knobs.items()]
    pins = dataclasses.make_dataclass(f"{group.title()}Pins", fields, kw_only=True, slots=True)
    pins.__doc__ = "\n".join(f"{name}: {knob.summary}" for name, knob in knobs.items())
    return pins


if TYPE_CHECKING:  # generated from the catalogue, which a type checker cannot see
    LoaderPins = Any
    PrecisionPins = Any
    LayoutPins = Any
    CompilePins = Any
    OptimizerPins = Any
    BackendPins = Any
    StepPins = Any
    MemoryPins = Any
    ThreadsPins = Any
    ParallelPins = Any
    NcclPins = Any
else:
    LoaderPins = pins_of("loader")
    PrecisionPins = pins_of("precision")
    LayoutPins = pins_of("layout")
    CompilePins = pins_of("compile")
    OptimizerPins = pins_of("optimizer")
    BackendPins = pins_of("backend")
    StepPins = pins_of("step")
    MemoryPins = pins_of("memory")
    ThreadsPins = pins_of("threads")
    ParallelPins = pins_of("parallel")
    NcclPins = pins_of("nccl")


@dataclass(kw_only=True, slots=True)
class Budget:
    """When a study ends: at the first of these limits.

    Attributes:
        minutes: wall time for everything, finals included; null for no limit.
        trials: trials of the search; null for no limit.
    """

    minutes: float | None = 8
    trials: int | None = None


@dataclass(kw_only=True, slots=True)
class StudyOptions:
    """The study as a whole.

    Attributes:
        name: the study's name and folder; null derives it from the model or the command.
        seed: seed of the sampler, of the finals' order and of a recipe's program.
        samples: length of the real training in samples, if time_for_samples is the objective or one of several objectives.
            Otherwise, length of an epoch in samples for cost_per_epoch, needed only if the program's loader has no length.
        budget: when the study ends.
    """

    name: str | None = None
    seed: int = 0
    samples: float | None = None
    budget: Budget = field(default_factory=Budget)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model of a recipe. A size that is null keeps the model's default.

    Attributes:
        source: library in which the name is looked up: torchvision, timm, transformers or builtin.
        name: name within the source; null when a command or your own model is tuned.
        factory: your own model: PACKAGE.MODULE:FUNCTION, a function without arguments that returns a torch.nn.Module.
        num_classes: outputs of a classifier.
        image_size: height and width of an input, pixels.
        num_layers: layers of a language model, hidden layers of mlp.
        hidden_size: width of these layers.
        num_heads: attention heads of a language model.
        vocab_size: number of different tokens of a language model.
    """

    source: str = "torchvision"
    name: str | None = None
    factory: str | None = None
    num_classes: int = 1000
    image_size: int = 224
    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    vocab_size: int | None = None


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The data of a recipe.

    Attributes:
        name: photos, fake_cifar or folder (images), text, tabular, or synthetic (for any model).
        root: folder of the data. For `folder`: one subfolder of images per class. For `photos`: where the photos are stored.
            For `text`: text files.
        factory: your own data: PACKAGE.MODULE:FUNCTION, a function without arguments that returns a Dataset or a DataLoader.
        sequence_length: tokens per sample of text.
        num_features: columns of the table.
    """

    name: str = "photos"
    root: str | None = None
    factory: str | None = None
    sequence_length: int = 512
    num_features: int = 64


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The training of a recipe; null leaves the program's default. Batch size and workers are knobs (loader.*).

    Attributes:
        optimizer: sgd or adamw.
        lr: learning rate.
        epochs: passes over the data. null: one pass in `autotune apply`; in a trial, as many passes as the measurement needs.
        samples_per_epoch: length of an epoch, in samples.
        global_batch: samples per optimizer step, over all processes. Gradient accumulation keeps it constant while the batch
            size changes. Applies to commands, too. null: a step's samples change with the batch size.
        step: your own step: PACKAGE.MODULE:FUNCTION, a function of (model, batch) that returns the batch's loss.
    """

    optimizer: str | None = None
    lr: float | None = None
    epochs: int | None = None
    samples_per_epoch: int | None = None
    global_batch: int | None = None
    step: str | None = None


@dataclass(kw_only=True, slots=True)
class SearchOptions:
    """How configurations are proposed.

    Attributes:
        sampler: rates (learns what device, loader and memory allow), tpe, gp (needs torch), random or grid.
        warm_start: auto uses the earlier studies in the runs folder that tuned the same program on the same machine. The search
            begins with their best configurations and leaves out those that ran out of memory there. off uses no earlier study.
            The name of a study, or several as [A,B], begins with the best configurations of these studies, even if they tuned
            another program. Earlier results do not count as measurements.
        seeds: whether an expert's initial configurations for this machine are tried before the sampler's proposals. The
            configurations of earlier studies (`warm_start`) are tried in any case.
        decomposition: whether `rates` models device rate and loader capacity separately; false models only the overall rate.
        memory_model: whether `rates` avoids configurations that it expects to run out of memory.
        cost_aware: whether `rates` weighs the expected improvement of a trial against the seconds that the trial takes.
        stop: whether the search ends once `rates` expects no further improvement, or too little for the time left; false
            continues until the search's share of the budget is used.
    """

    sampler: str = "rates"
    warm_start: Any = AUTO  # text or a list of texts, like `objective` below
    seeds: bool = True
    decomposition: bool = True
    memory_model: bool = True
    cost_aware: bool = True
    stop: bool = True


@dataclass(kw_only=True, slots=True)
class ConstraintOptions:
    """What a configuration must satisfy to win; null for no constraint.

    Attributes:
        memory_free_frac: minimum share of memory that must stay free. The share refers to the device's memory (on a CPU, the
            host's), or to device.memory_limit if it is set.
        max_power_w: maximum mean power of a GPU while it trains, watts.
        max_step_p95_s: maximum 95th percentile of the step times, seconds.
    """

    memory_free_frac: float | None = None
    max_power_w: float | None = None
    max_step_p95_s: float | None = None


@dataclass(kw_only=True, slots=True)
class MachineOptions:
    """Facts about the machine that autotune cannot find out.

    Attributes:
        price_per_hour: price of an hour on this machine, in any currency, for objective=cost_per_epoch.
    """

    price_per_hour: float | None = None


@dataclass(kw_only=True, slots=True)
class DeviceOptions:
    """What trials run on.

    Attributes:
        kind: auto (cuda if there is a CUDA device, else cpu), cuda or cpu.
        index: number of the CUDA device. If CUDA_VISIBLE_DEVICES is set, it is a position in that list. Otherwise, index=0 is
            the GPU that CUDA itself puts first, usually the fastest, and a higher index counts in the order of nvidia-smi (or
            of CUDA_DEVICE_ORDER if that is set).
        memory_limit: memory that each process may use: bytes, "8GiB" or a fraction of the device's memory between 0 and 1;
            null for no limit.
    """

    kind: str = "auto"
    index: int = 0
    memory_limit: str | float | int | None = None


@dataclass(kw_only=True, slots=True)
class SlurmOptions:
    """What autotune requests from Slurm with launcher=slurm; null leaves it to the cluster.

    Inside a job (salloc, sbatch), partition, account, qos, nodes and minutes cannot be given: trials are steps of that job.

    Attributes:
        partition: partition of the job.
        account: account that the job is charged to.
        qos: quality of service.
        nodes: number of nodes of a trial. With more than one, the command must start its ranks with srun, inside the job.
        gres: generic resources of each node, such as gpu:1.
        cpus: number of CPUs of each node.
        mem: memory of each node, such as 64G.
        minutes: time limit of the job. The job serves the whole study; if it ends earlier, another one replaces it.
        args: further arguments of srun, such as "--constraint=a100 --exclude=n7".
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int = 1
    gres: str | None = None
    cpus: int | None = None
    mem: str | None = None
    minutes: float | None = None
    args: str | None = None


@dataclass(kw_only=True, slots=True)
class RayOptions:
    """What autotune requests from Ray with launcher=ray.

    Attributes:
        address: address of the cluster: HOST:PORT. auto uses RAY_ADDRESS or, if it is not set, the cluster on this machine.
        python: an interpreter with the cluster's versions of Python and Ray; null for the one that autotune runs in.
        gpus: number of whole GPUs; null for one per process if the cluster has any and `device.kind` is not cpu.
        cpus: number of CPUs that Ray reserves, so that other Ray jobs do not get them. Trials may use every core of the node.
        autoscaling: whether the cluster adds nodes on demand. If so, autotune waits for a node that does not exist yet.
    """

    address: str = "auto"
    python: str | None = None
    gpus: int | None = None
    cpus: int = 1
    autoscaling: bool = False


@dataclass(kw_only=True, slots=True)
class LaunchOptions:
    """How a trial's processes are started.

    Attributes:
        nproc: processes of one trial of a recipe, started by torchrun on this machine. Each process gets a share of the
            data, and a GPU (from `device.index` on) or a share of the cores. Batch size and loader workers are per process.
        warm: auto forks search trials, if their knobs allow it, from a process that has already imported torch. This saves
            seconds per trial. off starts every trial in a fresh interpreter. Applies to commands, too.
        slots: how many search trials may run in parallel, each with GPUs and cores of its own; auto is the number of GPUs if
            the program is a single process on this machine and the GPUs are alike, else 1. Trials run in parallel only if a
            calibration shows that they do not slow each other down. Applies to commands, too.
        queue_minutes: longest wait for a node of a cluster; null for no limit. Waiting does not use up the budget.
        slurm: what autotune asks Slurm for.
        ray: what autotune asks Ray for.
    """

    nproc: int = 1
    warm: str = "auto"
    slots: int | str = "auto"
    queue_minutes: float | None = 60
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    ray: RayOptions = field(default_factory=RayOptions)


@dataclass(kw_only=True, slots=True)
class TrackerOptions:
    """Where results are tracked.

    Attributes:
        uri: MLflow tracking URI; none tracks nothing. null uses the variable MLFLOW_TRACKING_URI or, if it is not set, the
            store in the runs folder.
        experiment: name of the MLflow experiment. null uses "autotune" ("/Shared/autotune" on Databricks, where a name is an
            absolute path); MLFLOW_EXPERIMENT_NAME is for your own runs and is not used.
    """

    uri: str | None = None
    experiment: str | None = None


@dataclass(kw_only=True, slots=True)
class MeasureOptions:
    """How long to measure, and how long to wait.

    Attributes:
        screening: warm-up and stopping rules of baseline and search trials. Also limits a measuring window to a thirtieth of
            the budget, or to twice `min_s` if that is longer. If steps come in cycles, the limit is a quarter of the budget,
            but never more than `cycles_max_s`.
        finals: stricter warm-up and stopping rules, for the finals.
        racing: whether a search trial is stopped as soon as it is certainly slower than 0.8 times the best rate so far. This
            is the best rate of all trials of its tier and of lower tiers. Has an effect only if the objective depends on the
            rate alone.
        quiet: whether a disturbed trial (other programs on its cores or device, an overheated device) is repeated. A trial that
            is disturbed again gets no rate. If the machine never gets quiet, the study accepts its usual disturbance and keeps
            the rates. With false, a disturbance is only noted, and the rate is kept.
        start_s: limit from launch to the first batch, seconds.
        compile_s: limit of the compile phase, seconds.
        step_s: limit of one step, seconds. A trial without progress for this long, after its start and outside compilation,
            counts as hung.
    """

    # If the times of slow steps (see `slow_step_s`) vary by 8 %, a window of eight seconds resolves differences of 4 %. Fifteen
    # seconds resolve 3 %, but allow only half as many trials.
    screening: MeasureRules = field(default_factory=lambda: MeasureRules(slow_max_s=8.0))
    finals: MeasureRules = field(default_factory=lambda: MeasureRules(half_width_frac=0.005, slow_max_s=20.0))
    racing: bool = True
    quiet: bool = True
    start_s: float = 300.0
    compile_s: float = 900.0
    step_s: float = 180.0


@dataclass(kw_only=True, slots=True)
class ParityOptions:
    """What a configuration that computes differently (bf16, torch.compile, ...) must show before it may win.

    Attributes:
        steps: number of optimizer steps, counted from the first, whose losses are compared with the baseline's. Both runs use
            the same seed and batches. If the steps take longer than 20 s or 3 % of the budget, fewer are compared. 0 for no
            comparison.
        tolerance: by what fraction the loss may be worse than the baseline's. The first loss may be better or worse by three
            times this fraction.
    """

    steps: int = 40
    tolerance: float = 0.05


@dataclass(kw_only=True, slots=True)
class RecordOptions:
    """How much `autotune record` measures.

    Attributes:
        configurations: how many to measure at most. A larger search space is sampled; a smaller one is measured completely.
        repeats: measurements of each configuration, in fresh processes. Each round measures every configuration once.
        repeats_of_best: further measurements of the best few configurations (at most five, each at most a fifth worse than the
            best), so that noise does not decide which search method looks better in `autotune replay`.
        minutes: wall time of one run; null for no limit. `autotune resume` continues the recording.
    """

    configurations: int = 48
    repeats: int = 3
    repeats_of_best: int = 0
    minutes: float | None = None


@dataclass(kw_only=True, slots=True)
class ExplainOptions:
    """Whether a study explains its result.

    Attributes:
        auto: whether baseline and best are explained once the best is chosen: where their time goes, what a change would gain.
            This takes at most a tenth of the study's time. Measurements of the best configuration may take longer: all of the
            budget that is left. `autotune explain` explains a study at any later time.
    """

    auto: bool = True


@dataclass(kw_only=True, slots=True)
class ProgramOptions:
    """How a recipe's program is run.

    Attributes:
        python: interpreter of the recipe; null for the interpreter that autotune runs in.
    """

    python: str | None = None


@dataclass(kw_only=True, slots=True)
class StudyConfig:
    """The whole configuration.

    Attributes:
        study: the study as a whole.
        model: model of a recipe.
        data: data of a recipe.
        train: training of a recipe.
        loader: pinned knobs of the DataLoader; null leaves a knob to the search.
        precision: pinned knobs of number formats.
        layout: pinned knobs of memory layout.
        compile: pinned knobs of torch.compile.
        optimizer: pinned knobs of the optimizer's kernels.
        backend: pinned knobs of cuDNN, attention and the GPU's cache.
        step: pinned knobs of the optimizer's step as a whole.
        memory: pinned knobs of memory.
        threads: pinned knobs of CPU threads.
        parallel: pinned knobs of DistributedDataParallel and FSDP.
        nccl: pinned knobs of NCCL.
        env: pinned environment variables.
        search_space: name of a file in search_spaces/, or a path; "none" leaves only the domains on the command line.
        tiers: highest tier that may be searched: exact, numerics or training.
        search: how configurations are proposed.
        objective: throughput, time_for_samples, energy_per_sample or cost_per_epoch. Give several as [A,B]; the first decides.
        constraints: what a configuration must satisfy to win.
        machine: facts about the machine that autotune cannot find out.
        device: what trials run on.
        launch: how processes are started.
        launcher: what starts trials: local (on this machine), slurm (in a job on a node of a cluster) or ray (on a node of a
            Ray cluster).
        tracker: where results are tracked.
        runs_dir: folder of the studies.
        measure: how long to measure and to wait.
        parity: what a configuration that computes differently must show.
        explain: whether a study explains its result.
        program: how a recipe's program is run.
        record: how much `autotune record` measures.
        provenance: origin of an exported file; not a setting.
    """

    study: StudyOptions = field(default_factory=StudyOptions)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loader: LoaderPins = field(default_factory=LoaderPins)
    precision: PrecisionPins = field(default_factory=PrecisionPins)
    layout: LayoutPins = field(default_factory=LayoutPins)
    compile: CompilePins = field(default_factory=CompilePins)
    optimizer: OptimizerPins = field(default_factory=OptimizerPins)
    backend: BackendPins = field(default_factory=BackendPins)
    step: StepPins = field(default_factory=StepPins)
    memory: MemoryPins = field(default_factory=MemoryPins)
    threads: ThreadsPins = field(default_factory=ThreadsPins)
    parallel: ParallelPins = field(default_factory=ParallelPins)
    nccl: NcclPins = field(default_factory=NcclPins)
    env: dict[str, str] = field(default_factory=dict)
    search_space: str = "default"
    tiers: Tier = Tier.training
    search: SearchOptions = field(default_factory=SearchOptions)
    objective: Any = THROUGHPUT  # text or a list of texts, which OmegaConf has no type for
    constraints: ConstraintOptions = field(default_factory=ConstraintOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    launcher: str = LOCAL
    tracker: TrackerOptions = field(default_factory=TrackerOptions)
    runs_dir: str = "runs"
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    parity: ParityOptions = field(default_factory=ParityOptions)
    explain: ExplainOptions = field(default_factory=ExplainOptions)
    program: ProgramOptions = field(default_factory=ProgramOptions)
    record: RecordOptions = field(default_factory=RecordOptions)
    provenance: dict[str, Any] = field(default_factory=dict)
