"""Composes command line and files into a checked configuration, a search space and a command."""

from __future__ import annotations

import functools
import os
import shlex
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.checks import problems_of
from autotune.config.cluster import problems_of_nodes
from autotune.config.command import BATCH_SIZE, CommandTemplate, recipe_command, study_name, title, user_command
from autotune.config.conflicts import notes_of_knobs, problems_of_knobs, problems_of_secrets
from autotune.config.domains import read_space
from autotune.config.files import COMMAND_LINE_ONLY, Chosen
from autotune.config.keys import LEAVES
from autotune.config.literals import literal
from autotune.config.locate import folder, options
from autotune.config.overrides import Split, names_a_recipe, split
from autotune.config.provenance import Provenance
from autotune.config.recipe import is_recipe, problems_of_parts
from autotune.config.schema import LOCAL, OFF, StudyConfig
from autotune.config.slots import problems_of_slots
from autotune.config.wrapped_commands import ELSEWHERE, spread_by
from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import CATALOGUE, clash_words, clashes, is_knob, knob
from autotune.knobs.environment import PREFIX
from autotune.knobs.step import ACCUMULATION, tier_of
from autotune.knobs.values import shown, value_of
from autotune.machine import host_context as host_context_of
from autotune.machine import host_facts
from autotune.masking import Secrets, is_masked
from autotune.records import Knobs
from autotune.space import Domain, SearchSpace

T = TypeVar("T")
USERS_FILE = "autotune_users_file_"
# Stand-ins for the facts of a node that is not known yet. With them, every check of what a study needs from a node passes.
UNKNOWN_NODE: dict[str, Any] = {"num_cores": 1 << 16, "gpus": [{"name": "unknown"}]}
_LOCK = threading.Lock()  # Hydra's state is global to the process
ConfigStore.instance().store(name="study_config", node=StudyConfig)


@dataclass(kw_only=True)
class Composed:
    """All inputs of a study.

    Attributes:
        config: the configuration with resolved interpolations.
        space: the search space, not yet resolved for machine and program.
        command: the program's command.
        title: human-readable title of what is tuned.
        name: the study's name, given or derived.
        yaml: the configuration without secrets: `${oc.env:...}` stays unresolved, typed secrets are masked.
        notes: warnings to print before the first trial: pinned knobs without effect here, likely mistakes in the command.
        secrets: all secrets from the environment and the command line, for masking output.
        on_node: composes the same input for a node with the given facts; raises BadInput if the study cannot run there.
            None if the study already exists.
    """

    config: StudyConfig
    space: SearchSpace
    command: CommandTemplate
    title: str
    name: str
    yaml: str
    secrets: Secrets = field(default_factory=Secrets.known)
    notes: list[str] = field(default_factory=list)
    on_node: Callable[[dict[str, Any]], Composed] | None = None


def compose(
    overrides: Sequence[str],
    *,
    command: Sequence[str] | None,
    config_dirs: Sequence[Path] = (),
    runs_dir: str | None = None,
    facts: dict[str, Any] | None = None,
    document: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
) -> Composed:
    """Returns the checked configuration, search space and command.

    Args:
        overrides: KEY=VALUE in Hydra's grammar; sweeps of knobs become domains.
        command: the words after `--`; None if a recipe is tuned.
        config_dirs: the user's configuration folders from `--config-dir`, searched before conf/.
        runs_dir: folder of the studies from `--runs-dir`, taken literally; None leaves it to the configuration.
        facts: result of `machine.host_facts()`; None to call it here.
        document: further keys and values, already checked; overrides and files take precedence over them.
        node: facts of the node on which trials run, in the form of `facts`; None if trials run here or the node is unknown.

    Raises:
        BadInput: something cannot be used; lists all problems of the input at once.
    """
    check_words([*overrides, *(command or ())])
    again = functools.partial(
        compose, overrides, command=command, config_dirs=config_dirs, runs_dir=runs_dir, document=document
    )
    facts = node or facts or host_facts()
    context = functools.partial(host_context_of, facts, None, is_recipe=command is None, is_node=node is not None)
    here = context(device=_device_kind(overrides))
    given = split(overrides, list(config_dirs), here, has_command=command is not None)
    found = _Problems(missing_folders(config_dirs))
    found.add(given.problems, given.cause)
    if command is None and document is None:
        document = _recipe_of(given.files, overrides)
    if document:
        given.files.insert(0, Chosen(group="", document=document, package="_global_", keys=[]))
    if runs_dir is not None:
        document = {"runs_dir": literal(runs_dir)}
        given.files.append(Chosen(group="", document=document, package="_global_", keys=["runs_dir"]))
    raw = found.collect(lambda: _hydra(given))
    if raw is None:
        raise found.error()
    config = found.collect(lambda: typed(raw))
    if config is None:
        raise found.error()
    if config.launcher != LOCAL and node is None:
        return again(node=UNKNOWN_NODE)
    here = context(device=config.device.kind)
    found.add(problems_of(config, None if facts is UNKNOWN_NODE else facts.get("gpus") or []))
    found.add(problems_of_slots(config, facts))
    found.add(problems_of_nodes(config, command))
    if command is None and not found.problems:  # this imports the user's modules, which takes seconds
        found.add(problems_of_parts(config))
    pinned = found.collect(lambda: _pins(config, given, here))
    space = found.collect(lambda: _space(config, given, pinned or {}, here))
    template = found.collect(lambda: _command(config, command, overrides, here, given.domains))
    domains = {**given.domains, **(space.domains if space else {})}
    tried = [(key, value) for key, domain in domains.items() if domain for value in domain.values]
    filled = template.placeholders if template else {}
    found.add(problems_of_secrets([*(pinned or {}).items(), *tried, *filled.items()]))
    if template is not None:
        is_node_known = facts is not UNKNOWN_NODE
        found.add(problems_of_knobs(config, pinned or {}, given.domains, template, is_node_known=is_node_known))
    if template is None and not found.problems:  # model=FILE, with a file that names no model
        found.add(["model.name: not set, got a recipe without it. Give model.name=NAME, on the command line or in the file."])
    if found.problems or space is None or template is None:
        raise found.error()
    for key in template.placeholders:  # the knob of a placeholder is tuned even if the named search space omits it
        if key not in space.pinned and (key == BATCH_SIZE or not template.is_recipe):
            space.domains.setdefault(key, None)
    name = config.study.name or study_name(template, config)
    secrets = Secrets.known(words=[*overrides, *(command or ())])
    return Composed(
        config=config,
        space=space,
        command=template,
        title=title(template, config, secrets),
        name=name,
        yaml=_yaml(raw, secrets),
        secrets=secrets,
        notes=[*notes_of_knobs(config, space.pinned, template, here), *_notes_of_command(command or [], secrets)],
        on_node=lambda facts: again(node=facts),
    )


def _recipe_of(files: Sequence[Chosen], overrides: Sequence[str]) -> dict[str, Any] | None:
    """Returns the recipe that a chosen best.yaml was made for; None if no file has a recipe, or the command line names a model.

    Only plain values are taken from the file. The user's own code must be named on the command line.
    """
    if any(word.lstrip("+").startswith(("model=", "model.")) for word in overrides):
        return None
    for chosen in files:
        made: dict[str, Any] = {}
        for key, value in Provenance.of(chosen.document.get("provenance")).settings.items():
            group, _, name = key.partition(".")
            if key in LEAVES and key not in COMMAND_LINE_ONLY and group in ("model", "data", "train"):
                made.setdefault(group, {})[name] = literal(value) if isinstance(value, str) else value
        if made.get("model"):
            return made
    return None


def _notes_of_command(command: Sequence[str], secrets: Secrets) -> list[str]:
    """Returns warnings about words of a program's command: probable mistakes, and secrets."""
    notes = []
    if command and Path(command[0]).name in ELSEWHERE:
        name = Path(command[0]).name
        notes.append(f"COMMAND: {name} runs the program where autotune cannot measure it. Run autotune itself inside {name}.")
    if how := spread_by(command):
        notes.append(
            f"COMMAND: processes that {how} starts on other machines run without autotune, unless {how.split()[0]} passes on "
            "the environment. Start them with srun."
        )
    for word in command:
        key, equals, _ = word.lstrip("+").partition("=")
        if equals and "." in key and (key in LEAVES or is_knob(key)):
            notes.append(f"{key}: after '--' it is an argument of your program. A setting of autotune goes before '--'.")
    masked = secrets.words(command)
    at = next((at for at, word in enumerate(masked) if is_masked(word)), None)
    if at is not None:
        got = shlex.join(masked[max(0, at - 1) : at + 1])
        notes.append(
            f"COMMAND: contains a secret, got `{got}`. It is not stored, so this study can be neither resumed nor "
            "explained later. If that matters, let the program read it from an environment variable."
        )
    return notes


def check_words(words: Sequence[str]) -> None:
    """Checks that every word is valid UTF-8, since a study's records contain the words.

    Raises:
        BadInput: a word contains bytes that are not UTF-8.
    """
    wrong = [word for word in words if any("\ud800" <= letter <= "\udfff" for letter in word)]
    if wrong:
        raise BadInput(
            f"{shown(word)}: bytes that are not UTF-8. Rename the file, or write the word in UTF-8." for word in wrong
        )


def missing_folders(config_dirs: Sequence[Path]) -> list[str]:
    """Returns a problem for every `--config-dir` that is not a folder."""
    wrong = [str(path) for path in config_dirs if not os.path.isdir(path)]
    return [f"--config-dir: no such folder, got {shown(path)}. Give an existing folder." for path in wrong]


class _Problems:
    """The problems of one input, collected so that all are reported at once."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.cause: BaseException | None = None

    def add(self, problems: list[str], cause: BaseException | None = None) -> None:
        self.problems += problems
        self.cause = self.cause or cause

    def collect(self, make: Callable[[], T]) -> T | None:
        """Returns the result of `make`; None if it raised BadInput, whose problems are added."""
        try:
            return make()
        except BadInput as error:
            self.add(error.problems, error.__cause__)
            return None

    def error(self) -> BadInput:
        error = BadInput(dict.fromkeys(self.problems))
        error.__cause__ = self.cause
        return error


def _hydra(given: Split) -> DictConfig:
    """Returns Hydra's composition of conf/, the user's files and the overrides; restores Hydra's global state."""
    with _LOCK:
        shared, store = GlobalHydra.instance(), ConfigStore.instance()
        hydra_before, version_before = shared.hydra, VersionBase.instance().version_base
        try:
            shared.clear()
            # Hydra gets the checked content of the user's files under generated names, and opens none of the files.
            for number, file in enumerate(given.files):
                store.store(group=f"{USERS_FILE}{number}", name="chosen", node=file.document, package=file.package)
            chosen = [f"+{USERS_FILE}{number}=chosen" for number in range(len(given.files))]
            with hydra.initialize_config_dir(str(folder("conf")), job_name="autotune", version_base="1.3"):
                return hydra.compose("config", [*given.hydra, *chosen])
        except (HydraException, OmegaConfBaseException) as error:
            raise BadInput(_composition_problem(error)) from error
        finally:
            shared.hydra = hydra_before
            GlobalHydra.set_instance(shared)
            VersionBase.instance().version_base = version_before


def _composition_problem(error: BaseException) -> str:
    """Returns the message for a failed composition, including the error's causes, which say what is wrong."""
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None:
        texts.append(" ".join(str(link).split()))
        link = link.__cause__
    return f"configuration: cannot be composed: {'; '.join(dict.fromkeys(texts))}. Correct the file or the override."


def _yaml(raw: DictConfig, secrets: Secrets) -> str:
    """Returns a composition as YAML without secrets. `${oc.env:NAME}` stays unresolved, so only the name is stored."""
    return OmegaConf.to_yaml(OmegaConf.create(secrets.document(OmegaConf.to_container(raw, resolve=False))))


def typed(raw: DictConfig) -> StudyConfig:
    """Returns the configuration as dataclasses, interpolations resolved and `~` expanded (shells may keep it in KEY=~/x)."""
    try:
        config = cast(StudyConfig, OmegaConf.to_object(raw))
    except OmegaConfBaseException as error:
        key = str(error.full_key or "configuration")
        why = shown(str(error).splitlines()[0])
        problem = f"{key}: cannot be resolved, got {shown(_written(raw, key))} ({why}). Set what it refers to, or give a value."
        raise BadInput(problem) from error
    for owner, name in ((config, "runs_dir"), (config.data, "root"), (config.program, "python")):
        if path := getattr(owner, name):
            setattr(owner, name, os.path.expanduser(path))
    if config.launch.warm.lower() == "false":  # YAML reads `off` in a file as False
        config.launch.warm = OFF
    return config


def _written(raw: DictConfig, key: str) -> Any:
    """Returns the value of a key as written, with references unresolved."""
    found: Any = OmegaConf.to_container(raw, resolve=False)
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _device_kind(overrides: Sequence[str]) -> str:
    """Returns `device.kind` from the command line. Domains are checked against the device before there is a configuration."""
    pairs = [word.lstrip("+").partition("=") for word in overrides]
    said = [value for key, _, value in pairs if key == "device.kind"]
    return said[-1] if said else "auto"


def _pins(config: StudyConfig, given: Split, here: HostContext) -> Knobs:
    """Returns the pinned knobs; a domain on the command line overrides a pin from a file."""
    written = {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in CATALOGUE}
    written |= {f"{PREFIX}{name}": value for name, value in config.env.items()}
    pins: Knobs = {}
    problems: list[str] = []
    for key, value in written.items():
        if value is None or key in given.domains:
            continue
        try:
            pins[key] = value_of(knob(key), value, here)
        except BadInput as error:
            problems += error.problems
    workers, some = "loader.num_workers", 2
    problems += [
        f"{key}: has no effect without workers, got {value!r} with {workers}={pins[workers]}. Set it to null."
        for key, value in pins.items()
        if workers in pins and not knob(key).is_active(pins) and knob(key).is_active({**pins, workers: some})
    ]
    if problems:
        raise BadInput(problems)
    return pins


def _space(config: StudyConfig, given: Split, pinned: Knobs, here: HostContext) -> SearchSpace:
    is_held = config.train.global_batch is not None
    tiers = {key: tier_of(knob(key), is_held=is_held) for key in given.domains}
    problems = [
        f"{key}: its tier is {tier}, which tiers={config.tiers} leaves out of the search, got a domain. "
        f"Give tiers={tier}, or leave the domain out."
        for key, tier in tiers.items()
        if tier.rank > config.tiers.rank
    ]
    if is_held and ACCUMULATION.key in given.domains:
        problems.append(
            f"{ACCUMULATION.key}: derived from train.global_batch={config.train.global_batch}, got a domain. "
            "Leave one of the two out."
        )
    asked = {*pinned, *given.domains}
    problems += [clash_words(*pair) for pair in clashes(asked)]
    if problems:
        raise BadInput(problems)
    domains: dict[str, Domain | None] = {**read_space(config.search_space, here), **given.domains}
    left_out = {}
    for pair in clashes(domains.keys() | asked):  # the command line takes precedence over the search space
        for key, other in (pair, pair[::-1]):
            if key not in asked:
                left_out[key] = f"{other} sets the same variable"
    return SearchSpace(
        domains={key: domain for key, domain in domains.items() if key not in pinned and key not in left_out},
        pinned=pinned,
        tiers=config.tiers,
        is_held=is_held,
        left_out=left_out,
        typed=frozenset(given.domains),
    )


def _command(
    config: StudyConfig,
    command: Sequence[str] | None,
    overrides: Sequence[str],
    here: HostContext,
    asked: Collection[str],
) -> CommandTemplate:
    if command is not None:
        if config.program.python is not None:
            raise BadInput(
                f"program.python: only for recipes, got {config.program.python!r} with a command of your own. Write the "
                "interpreter into the command: -- PYTHON train.py."
            )
        return user_command(command, here)
    if not is_recipe(config):
        names = ", ".join(options("model", [folder("conf")]))
        if config.model.source == "timm":
            raise BadInput("model.name: the name of the timm model is missing. Give model=timm/NAME.")
        if any(map(names_a_recipe, overrides)):  # such an override has a problem that was already reported
            raise BadInput([])
        own = "your own as model.factory=PACKAGE.MODULE:FUNCTION"
        raise BadInput(
            f"model: nothing to tune. Give model=NAME ({names}), {own}, or a command: autotune run -- python train.py."
        )
    return recipe_command(config, has_cuda=here.has_cuda, asked=asked)
