"""Reads the configuration of an existing study from its folder, not from conf/ and search_spaces/, which may have changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config import yaml_file
from autotune.config.checks import problems_of
from autotune.config.cluster import resumed_options
from autotune.config.command import CommandTemplate
from autotune.config.compose import Composed, typed
from autotune.config.domains import parse
from autotune.config.schema import LOCAL, StudyConfig
from autotune.config.slots import problems_of_slots
from autotune.documents import read_text
from autotune.errors import BadInput
from autotune.masking import Secrets, is_masked
from autotune.plain_text import plain, shortened
from autotune.records import StudyRecord
from autotune.space import SearchSpace, domain_from_json

CHANGEABLE = ("study.budget.minutes", "study.budget.trials")
CHANGEABLE_RECORDING = ("record.minutes", "record.repeats", "record.repeats_of_best")
ANOTHER = "Start a new study with `autotune run`."


def recorded(study: StudyRecord, file: Path, overrides: Sequence[str] = (), *, is_alone: bool = False) -> Composed:
    """Returns the inputs of a study.

    Args:
        study: the study's record, with command, working directory and requested search space.
        file: the study's config.yaml.
        overrides: KEY=VALUE. Only the budget may be changed; in a recording, only the minutes and repeats.
        is_alone: whether trials run one at a time. The cluster then needs no room for several slots.

    Raises:
        BadInput: the file cannot be read by this version, or another key would be changed.
    """
    values = [("COMMAND", study.command), *study.placeholders.items(), *study.pinned.items(), *study.asked.items()]
    if lost := dict.fromkeys(key for key, value in values if is_masked(value)):
        raise BadInput(f"{key}: contains a secret, whose value was not recorded. {ANOTHER}" for key in lost)
    raw = _read(file)
    changeable = CHANGEABLE_RECORDING if study.recording else CHANGEABLE
    problems = [problem for word in overrides if (problem := _override(raw, word, changeable))]
    if problems:
        raise BadInput(problems)
    try:
        config = typed(raw)
        domains = {key: domain_from_json(domain) for key, domain in study.asked.items()}
    except ValueError as error:
        raise BadInput(f"{file.with_name('study.json')}: {error}. {ANOTHER}") from error
    config.launch.slurm = resumed_options(config.launch.slurm, os.environ)
    # The job in which the study is resumed may have no room for the study's slots.
    more = [] if is_alone or config.launcher == LOCAL else problems_of_slots(config, {}, is_recorded=True)
    if problems := [*problems_of(_as_seen_by_trials(config, study.cwd)), *more]:
        raise BadInput(problems)
    config.runs_dir = str(file.parent.parent)  # the recorded path may be relative to another folder, or the study was moved
    is_held = config.train.global_batch is not None
    space = SearchSpace(domains=domains, pinned=study.pinned, tiers=config.tiers, is_held=is_held)
    command = CommandTemplate(parts=study.command, placeholders=study.placeholders, is_recipe=study.is_recipe, cwd=study.cwd)
    return Composed(
        config=config,
        space=space,
        command=command,
        title=study.title,
        name=study.name,
        yaml=OmegaConf.to_yaml(raw),
        secrets=Secrets.known(),
    )


def _as_seen_by_trials(config: StudyConfig, cwd: str) -> StudyConfig:
    """Returns the configuration with relative paths resolved as in a trial: from `cwd`, the trials' working directory."""
    root, python = config.data.root, config.program.python
    root = os.path.join(cwd, root) if root and root.strip() else root
    python = os.path.join(cwd, python) if python and os.sep in python else python
    data, program = replace(config.data, root=root), replace(config.program, python=python)
    return replace(config, data=data, program=program)


def _read(file: Path) -> DictConfig:
    try:
        document = yaml_file.loaded(read_text(file))
        if not isinstance(document, dict):
            raise BadInput(f"{file}: not a configuration, got {document!r:.80}. {ANOTHER}")
        schema = OmegaConf.structured(StudyConfig)
        return cast(DictConfig, OmegaConf.merge(schema, OmegaConf.create(_without_removed(document, schema))))
    except (OSError, ValueError, OverflowError, OmegaConfBaseException) as error:
        why = shortened(" ".join(plain(str(error)).split()), 200)
        raise BadInput(f"{file}: not a configuration that this version can read, got: {why}. {ANOTHER}") from error


def _without_removed(document: dict[str, Any], schema: DictConfig) -> dict[str, Any]:
    """Leaves out settings that only an earlier version had and that the study did not set."""
    kept = dict(document)
    for group, keys in document.items():
        if isinstance(keys, dict) and isinstance(known := schema.get(group), DictConfig):
            kept[group] = {key: value for key, value in keys.items() if value is not None or key in known}
    return kept


def _override(raw: DictConfig, word: str, changeable: Sequence[str]) -> str:
    """Applies KEY=VALUE; returns what is wrong with it, or ""."""
    key, equals, text = word.lstrip("+").partition("=")
    if not equals:
        return f"KEY=VALUE: no value, got {word!r}. Give one: {changeable[0]}=16."
    if key not in changeable:
        return f"{key}: cannot be changed in an existing study, got {word!r}. Allowed: {', '.join(changeable)}. {ANOTHER}"
    try:
        OmegaConf.update(raw, key, parse(word).value())  # parsed as in `run`: empty text is not null, and 1:30 is text
    except (BadInput, OverflowError, OmegaConfBaseException):
        return f"{key}: not a number, got {text!r}. Give one, or null for no limit."
    return ""
