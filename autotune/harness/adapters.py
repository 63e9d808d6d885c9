"""Holds what the harness knows about particular libraries: training frameworks, models and trackers.

Other modules depend only on what programs do with torch, so they treat all libraries alike. There are exceptions:
explain/stages.py and explain/kept_results.py know functions that read and decode images and audio, and knobs/float8.py knows
torchao.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from .patches import Wrap, patches

# Batch samplers of these modules read `batch_size` each time they make a batch. For other samplers it is unknown whether
# setting `batch_size` changes their batches, so the batches are inspected before the knob counts as applied.
READ_BATCH_SIZE_AS_THEY_GO: Tuple[str, ...] = ("torch.", "accelerate.")

# Loaders of libraries whose constructor does not call that of torch's DataLoader: module -> (class of the loader, class of its
# iterators if it has workers).
LOADERS: Dict[str, Tuple[str, str]] = {
    "torchdata.stateful_dataloader.stateful_dataloader": ("StatefulDataLoader", "_StatefulMultiProcessingDataLoaderIter"),
}


def reads_batch_size_as_it_goes(batch_sampler: Any) -> bool:
    """Whether setting a batch sampler's `batch_size` is known to change its batches."""
    return type(batch_sampler).__module__.startswith(READ_BATCH_SIZE_AS_THEY_GO)


def _keep_wandb_offline(at_start: Mapping[str, str], wandb: Any) -> None:
    # The argument `mode` of `wandb.init` takes precedence over WANDB_MODE and the settings, so it is replaced (wandb 0.31).
    if at_start.get("WANDB_MODE") != "offline":  # the tuner sets "offline"; the user has chosen another mode for trials
        return

    def around(init: Any) -> Any:
        def offline(*arguments: Any, **named: Any) -> Any:
            if (named.get("mode") or os.environ.get("WANDB_MODE")) != "disabled":
                named["mode"] = "offline"
            return init(*arguments, **named)

        return offline

    patches.install(wandb, "init", around)


def _keep_mlflow_in_scratch(at_start: Mapping[str, str], utils: Any) -> None:
    # MLflow calls `_resolve_tracking_uri` for every store's address, no matter how the address was set (MLflow 3.17).
    own = at_start.get("MLFLOW_TRACKING_URI", "")

    def scratch(tracking_uri: Any = None) -> Any:
        return own

    if own.startswith("file:"):  # set by the tuner; the user has chosen any other address for trials
        patches.install(utils, "_resolve_tracking_uri", lambda resolve: scratch)


# Functions of huggingface_hub that send or change something and return nothing.
WITHOUT_RESULT = (
    *("preupload_lfs_files", "batch_bucket_files", "create_branch", "create_tag"),
    *("delete_branch", "delete_tag", "delete_repo", "super_squash_history", "delete_bucket"),
    *("move_repo", "move_bucket", "update_repo_settings"),
)


def _keep_files_off_the_hub(_: Any, hf_api: Any) -> None:
    # Every upload to a repository ends in `create_commit`; `preupload_lfs_files` may send large files before it. The Trainer of
    # transformers makes the repository (`create_repo`) before it trains (huggingface_hub 2.4), and `push_to_hub` a branch.
    def whole(api: Any, name: str, token: Any) -> str:
        return name if "/" in name else f"{api.whoami(token)['name']}/{name}"

    def no_commit(create_commit: Any) -> Any:
        def not_uploaded(self: Any, repo_id: str, *_: Any, commit_message: str = "", **named: Any) -> Any:
            url, oid = f"{self.endpoint}/{repo_id}/commit", "0" * 40
            info = hf_api.CommitInfo(f"{url}/{oid}", commit_message, named.get("commit_description") or "", oid)
            return self.run_as_future(lambda: info) if named.get("run_as_future") else info

        return not_uploaded

    def no_repo(create_repo: Any) -> Any:
        def not_created(self: Any, repo_id: str, *, token: Any = None, repo_type: Any = None, **_: Any) -> Any:
            kind = "" if repo_type in (None, "model") else f"{repo_type}s/"
            return hf_api.RepoUrl(f"{self.endpoint}/{kind}{whole(self, repo_id, token)}", endpoint=self.endpoint)

        return not_created

    def no_bucket(create_bucket: Any) -> Any:
        def not_created(self: Any, bucket_id: str, *, token: Any = None, **_: Any) -> Any:
            url = f"{self.endpoint}/buckets/{whole(self, bucket_id, token)}"
            return sys.modules["huggingface_hub"].BucketUrl(url, endpoint=self.endpoint)

        return not_created

    def nothing(_: Any) -> Any:
        return lambda *arguments, **named: None

    def patched(bound: Any) -> Any:  # the module also offers the methods of its object `api` as functions
        return lambda *arguments, **named: getattr(hf_api.api, bound.__name__)(*arguments, **named)

    silent = dict.fromkeys(WITHOUT_RESULT, nothing)
    made = {"create_commit": no_commit, "create_repo": no_repo, "create_bucket": no_bucket}
    for name, replace in {**made, **silent}.items():
        if hasattr(hf_api.HfApi, name):  # older versions have no buckets
            patches.install(hf_api.HfApi, name, replace)
            patches.install(hf_api, name, patched)


# Module of a library that records runs in an account or on a server -> function that prevents a trial from recording there.
# The function is called once the module has been imported, with the content of protocol.RECORDS_VARIABLE and the module.
KEEP_RECORDS_AWAY: Dict[str, Callable[[Mapping[str, str], Any], None]] = {
    "wandb": _keep_wandb_offline,
    "mlflow.tracking._tracking_service.utils": _keep_mlflow_in_scratch,
    "huggingface_hub.hf_api": _keep_files_off_the_hub,
}
# Libraries whose import may read environment variables that differ between trials (launchers/environment.py sets these).
TRACKERS = frozenset({"wandb", "mlflow", "comet_ml", "clearml", "neptune", "neptune_scale", "swanlab", "trackio"})


def guard_files(saving: Wrap, loading: Wrap) -> None:
    """Wraps a library's functions that open checkpoints in compiled code, not through Python (safetensors 0.8, in Rust).

    Args:
        saving: wraps a function `save(object, path, ...)`.
        loading: wraps a function `load(path, ...)`.
    """

    def around_save(save_file: Any) -> Any:
        saved = saving(save_file)
        return lambda tensors, filename, *arguments, **named: saved(tensors, filename, *arguments, **named)

    def around_load(load_file: Any) -> Any:
        loaded = loading(load_file)
        return lambda filename, *arguments, **named: loaded(filename, *arguments, **named)

    def act(module: Any) -> None:
        patches.install(module, "save_file", around_save)
        patches.install(module, "load_file", around_load)

    patches.on_import("safetensors.torch", act)


# Models of the library transformers have two methods that turn activation checkpointing on and off. Their layers have a flag
# that shows whether it is on.
CHECKPOINTING_SWITCHES: Tuple[Tuple[str, str], ...] = (
    ("activation_checkpointing_enable", "activation_checkpointing_disable"),
    ("gradient_checkpointing_enable", "gradient_checkpointing_disable"),  # the name before transformers 5
)


def checkpointing_switches(module: Any) -> "list[tuple[Any, Any]]":
    """Returns functions (turn on, turn off) for the outermost submodules that have a switch for activation checkpointing.

    The function that turns it on takes the keyword arguments of `torch.utils.checkpoint`, as a dictionary.
    """
    from . import members  # imports torch, which may not be imported yet when this module is

    for on, off in CHECKPOINTING_SWITCHES:
        pair = members.attribute(module, on), members.attribute(module, off)
        if all(map(callable, pair)):
            return [pair] if members.attribute(module, "supports_gradient_checkpointing", True) else []
    return [pair for child in members.children(module) for pair in checkpointing_switches(child)]


def is_checkpointing(module: Any) -> bool:
    """Whether the flag of a module's own activation checkpointing is set."""
    from . import members

    return members.attribute(module, "gradient_checkpointing") is True


# Functions return torchvision's boxes, masks and images as plain tensors, except the functions in a set of torchvision: (module
# of the set, name of the set).
KEEPING_CLASS = ("torchvision.tv_tensors._torch_function_helpers", "_FORCE_TORCHFUNCTION_SUBCLASS")


def keep_class_in(function: Any) -> None:
    """Adds a function that replaces one of torch's to torchvision's set, so torchvision's tensors keep their class in it.

    This is needed if torchvision was imported before the replacement: its set then holds torch's function. If torchvision is
    imported later, it finds the replacement by itself.
    """
    name, of_set = KEEPING_CLASS
    if name in sys.modules:
        getattr(sys.modules[name], of_set, set()).add(function)


class MetricReader(NamedTuple):
    """A library's trainer class that reads losses and metrics back from the device during training.

    Attributes:
        kind: name of the class.
        method: name of the method that starts training.
        interval: returns the smallest number of steps between two readings under an instance's settings; None if the instance
            never reads, or if its readings are not a fixed number of steps apart.
        seldom: makes an instance read at most once in a given number of steps; leaves a longer interval as it is.
        why_not: returns why an instance's interval cannot be set; "" if it can.
    """

    kind: str
    method: str
    interval: Callable[[Any], Optional[int]]
    seldom: Callable[[Any, int], None]
    why_not: Callable[[Any], str] = lambda _: ""


def _interval_of_transformers(trainer: Any) -> Optional[int]:
    arguments = trainer.args
    if arguments.logging_nan_inf_filter:
        return 1
    if getattr(arguments.logging_strategy, "value", arguments.logging_strategy) != "steps" or arguments.logging_steps < 1:
        return None  # the Trainer logs at the end of an epoch, never, or after a share of all steps (logging_steps=0.1)
    return int(arguments.logging_steps)


def _set_interval_of_transformers(trainer: Any, steps: int) -> None:
    arguments = trainer.args
    arguments.logging_nan_inf_filter = arguments.logging_nan_inf_filter and steps == 1
    if arguments.logging_steps >= 1:
        arguments.logging_steps = max(int(arguments.logging_steps), steps)


def _bar_of_lightning(trainer: Any) -> Any:
    bar = getattr(trainer, "progress_bar_callback", None)
    return bar if bar is not None and getattr(bar, "is_enabled", True) else None


def _interval_of_lightning(trainer: Any) -> Optional[int]:
    bar, found = _bar_of_lightning(trainer), []
    if bar is not None:  # a bar shows what modules log with prog_bar=True; only bars that count batches can refresh less often
        found.append(int(bar.refresh_rate) if _counts_batches(bar) else 1)
    if trainer.loggers and trainer.log_every_n_steps:
        found.append(int(trainer.log_every_n_steps))
    return min(found, default=None)


def _set_interval_of_lightning(trainer: Any, steps: int) -> None:
    bar = _bar_of_lightning(trainer)
    if bar is not None and _counts_batches(bar):
        bar._refresh_rate = max(int(bar.refresh_rate), steps)
    if trainer.log_every_n_steps:
        trainer.log_every_n_steps = max(int(trainer.log_every_n_steps), steps)


def _counts_batches(bar: Any) -> bool:
    return any(kind.__name__ == "TQDMProgressBar" for kind in type(bar).__mro__) and hasattr(bar, "_refresh_rate")


def _why_not_of_lightning(trainer: Any) -> str:
    bar = _bar_of_lightning(trainer)
    is_fixed = bar is not None and not _counts_batches(bar)
    return f"the program's progress bar ({type(bar).__name__}) reads its metrics at every batch" if is_fixed else ""


_LIGHTNING = MetricReader(  # `fit`, `validate` etc. call `_run`; these are not patched, as LightningCLI reads their signatures
    "Trainer", "_run", _interval_of_lightning, _set_interval_of_lightning, _why_not_of_lightning
)
METRIC_READERS: Dict[str, MetricReader] = {  # by the module that defines the class
    "transformers.trainer": MetricReader("Trainer", "train", _interval_of_transformers, _set_interval_of_transformers),
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
}
