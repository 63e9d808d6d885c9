"""The kinds of input that are fuzzed: valid input of each kind, and a strategy that damages it."""

from __future__ import annotations

import gzip
import json
import struct
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from autotune.config.keys import LEAVES
from autotune.documents import as_json
from autotune.harness.explain.documents import Compiled
from autotune.launchers.link import BEAT, START
from autotune.launchers.messages import from_launch
from autotune.replay.table import FORMAT, SCHEMA
from tests.benchmarks.fuzz.damage import (
    FEW,
    SELDOM,
    TEXTS,
    Case,
    Draw,
    damaged,
    damaged_list,
    json_lines,
    spoiled,
    spoiled_text,
    word,
)
from tests.corpus.documents import LAUGHS
from tests.explain import passes
from tests.replay.tables import make_table
from tests.support.launcher_contract import a_launch
from tests.support.studies import MACHINE

# Words ---------------------------------------------------------------------------------------------------------------------

SETTINGS = (
    "loader.num_workers=1", "loader.batch_size=choice(8,16)", "loader.num_workers=0,1", "precision.amp=bf16", "env.A=1",
    "env.B=choice(1,2)", "study.budget.minutes=3", "study.name=mine", "objective=[throughput,peak_memory]", "train.lr=0.1",
    "objective=time_for_samples", "study.samples=1000", "search_space=quick", "tiers=exact", "threads.intra=range(1,3)",
    "measure.max_s=5", "tracker.uri=http://127.0.0.1:1", "launcher=slurm", "launch.slurm.args=[--qos=x]", "+mine=best",
    "search.warm_start=resnet18", "compile.mode=choice(off,default)", "constraints.max_power_w=100", "launch.slots=2",
    "loader.batch_size=tag(x,choice(1,2))", "device.kind=cpu", "data=synthetic", "model.name=resnet18",
)  # fmt: skip
SETTING, KEY = st.sampled_from(SETTINGS), st.sampled_from(tuple(LEAVES))
SIGN = st.sampled_from(("",) * 12 + ("+", "++", "~"))
SWEEP = st.sampled_from(("{}",) * 12 + ("choice({},1)", "range(1,{})", "interval(0,{})", "glob({})", "[{},1]", "{{a:{}}}"))
RUN, RECIPE = ["run", "--dry-run"], ["model=resnet18"]
COMMAND = ["--", "python", "train.py", "--batch", "{loader.batch_size=4}"]
START_OF_RUN = st.sampled_from((["--dry-run"], ["--dry-run", "--json"], ["--cfg"]))


@st.composite
def overrides(draw: Draw) -> Case:
    """Returns overrides, some of which have another key, an odd value, a wrong operator or damaged text."""
    words = []
    for _ in range(draw(st.integers(1, 4))):
        key, _, value = draw(SETTING).partition("=")
        key, value = draw(KEY) if draw(SELDOM) else key, draw(TEXTS) if draw(SELDOM) else value
        words.append(spoiled_text(draw, f"{draw(SIGN)}{key}={draw(SWEEP).format(value)}"))
    words = [*draw(START_OF_RUN), "--config-dir", ".", *(word for word in words if not word.startswith("-"))]
    return Case(words=["run", *RECIPE, *words] if draw(st.booleans()) else ["run", *words, *COMMAND])


LINES = (
    "run --dry-run model=resnet18 study.budget.minutes=3", "run --dry-run --json -- python train.py", "run --cfg model=mlp",
    "run --info searchpath --config-dir mine model=resnet18", "list --json", "show resnet18", "show --trial 1 --json",
    "explain resnet18 --trial 0 --passes lines", "report resnet18 -o out.html --width 900", "export resnet18 --format hf",
    "export -f env --tier exact --json", "apply best.yaml -- python train.py", "verify best.yaml --rounds 3 -- python train.py",
    "verify resnet18 --minutes 1 --long --long-minutes 1", "resume resnet18 study.budget.minutes=90", "show --why",
    "knobs --page", "knobs loader.num_workers", "knobs --json", "inspect -- python train.py", "--version",
    "doctor data.root=mine --json", "run --help",
    "replay table.jsonl.gz --seeds 1 --trials 2 --sampler random:search.stop=false --jobs 1",
    "record record.minutes=1 -- python train.py",
    "sync --all --uri http://127.0.0.1:1", "ui --port 5001",
)  # fmt: skip
OPTIONS = (
    "--json", "--quiet", "--runs-dir", "--trial", "--why", "--format", "--tier", "--rounds", "--minutes", "--all", "--follow",
    "--uri", "--host", "--port", "--help", "--config-dir", "--cfg", "--info", "--dry-run", "--passes", "--finding", "--pairs",
    "--fixed", "--long", "--raw", "--markdown", "--seeds", "--trials", "--sampler", "-f", "-q", "-x", "--nosuch", "--",
)  # fmt: skip
LINE, OPTION = st.sampled_from([line.split() for line in LINES]), st.sampled_from(OPTIONS)
EDIT = st.sampled_from(("add", "add", "value", "value", "drop", "repeat", "spoil", "swap"))


@st.composite
def command_lines(draw: Draw) -> Case:
    """Returns a command line with words added, replaced, left out, repeated, damaged and moved forward."""
    words = list(draw(LINE))
    for _ in range(draw(FEW)):
        at, how = draw(st.integers(0, len(words) - 1)), draw(EDIT)
        old = words[at]
        new = {"add": [old, draw(OPTION), draw(TEXTS)], "drop": [], "repeat": [old, old], "swap": [words[-1], old]}
        words[at : at + 1] = [spoiled_text(draw, old)] if how == "spoil" else new.get(how, [draw(TEXTS)])
        words = words or ["show"]
    return Case(words=list(map(word, words)))


# Files ---------------------------------------------------------------------------------------------------------------------

BEST: dict[str, Any] = {
    "precision": {"amp": "bf16"}, "loader": {"batch_size": 64, "num_workers": 2}, "env": {"A": "1"},
    "provenance": {
        "study": "resnet18", "date": "2026-11-22", "verdict": "faster", "versions": {"autotune": "0.1.0"},
        "speedup": {"ratio": 1.5, "ci": [1.4, 1.6], "num_rounds": 4, "freedom": 3.0, "verdict": "faster"},
        "baseline": {"value": 10.0, "ci": [9.0, 11.0]}, "best": {"value": 15.0, "ci": [14.0, 16.0]},
        "program": {"command": ["python", "train.py", "--batch", "{loader.batch_size}"], "cwd": "/home/me"},
        "identity": {"cpu_model": "EPYC", "num_cores": 2, "torch": "2.14.1"}, "settings": {"measure.max_s": 5.0},
        "pinned": ["env.A"], "secret": [], "target": [{"site": "train.py:5", "ordinal": 0, "code": "main", "nth": 0}],
    },
}  # fmt: skip
OF_RECIPE = {**BEST, "provenance": {**BEST["provenance"], "settings": {"model.name": "resnet18", "data.name": "photos"}}}
SPACE: dict[str, Any] = {
    "loader.batch_size": [8, 16], "loader.num_workers": "auto", "precision.amp": "choice(off,bf16)", "env.A": ["1", "2"],
    "threads.intra": {"choice": [1, 2]}, "compile": {"mode": "auto"},
}  # fmt: skip
CONF = {"loader": {"num_workers": 1}, "study": {"seed": 3, "budget": {"minutes": 3}}, "env": {"A": "1"}, "tiers": "exact"}
CONFIG = {"model": {"name": "resnet18"}, "tracker": {"uri": None}, "study": {"budget": {"minutes": 8.0}}, "env": {"A": "1"}}
GLOBAL = "# @package _global_\n"
MINE = [*RUN, "--config-dir", "."]
ROLES: tuple[tuple[str, Any, str, list[str]], ...] = (  # file, its content, its first line, and the command that reads it
    ("space.yaml", SPACE, "", [*RUN, "search_space=./space.yaml", *RECIPE]),
    ("mine/made.yaml", CONF, GLOBAL, [*MINE, "+mine=made", *RECIPE]),
    ("mine/made.yaml", CONF["loader"], "# @package loader\n", [*MINE, "+mine=made", *COMMAND]),
    ("model/made.yaml", {"name": "resnet18", "num_classes": 10}, "", [*MINE, "model=made"]),
    ("made.yaml", BEST, GLOBAL, ["apply", "made.yaml", "--", "python", "train.py"]),
    ("made.yaml", OF_RECIPE, GLOBAL, ["apply", "made.yaml"]),
    ("made.yaml", BEST, GLOBAL, ["verify", "made.yaml", "--", "python", "train.py"]),
    ("made.yaml", OF_RECIPE, GLOBAL, ["verify", "made.yaml"]),
    ("runs/resnet18/best.yaml", BEST, GLOBAL, ["verify", "resnet18"]),
    ("runs/resnet18/config.yaml", CONFIG, "", ["resume", "resnet18", "study.budget.minutes=90"]),
)
ROLE = st.sampled_from(ROLES)


@st.composite
def yaml_files(draw: Draw) -> Case:
    """Returns a YAML file of one of `ROLES` with damaged values or damaged text."""
    name, document, head, words = draw(ROLE)
    text = yaml.safe_dump(damaged(draw, document), allow_unicode=True, sort_keys=False, default_flow_style=draw(st.booleans()))
    head += LAUGHS if draw(SELDOM) and draw(SELDOM) else ""
    return Case(words=list(words), files={name: spoiled(draw, (head + text).encode("utf-8", "surrogatepass"))})


def _table_lines() -> list[Any]:
    table = asdict(make_table(repeats=2))
    measurements = table.pop("measurements")
    return [{"format": FORMAT, "schema": SCHEMA, **table}, *measurements]


TABLE = _table_lines()
TABLE_BYTES = gzip.compress(json_lines(TABLE), 1, mtime=0)
SAMPLER = st.sampled_from(("--sampler=random", "--sampler=random", "--sampler=default"))


@st.composite
def tables(draw: Draw) -> Case:
    """Returns a recorded table with a damaged header, measurement, line or byte."""
    at = draw(st.integers(1, len(TABLE) - 1))
    lines = [*damaged_list(draw, [TABLE[0], TABLE[at]]), *TABLE[1:at], *TABLE[at + 1 :]]
    content = spoiled(draw, gzip.compress(spoiled(draw, json_lines(lines)), 1, mtime=0))
    words = ["replay", "made.jsonl.gz", "--seeds=1", "--trials=3", "--jobs=1", draw(SAMPLER)]
    return Case(words=words, files={"made.jsonl.gz": content})


JOURNAL = [
    {"op_code": 0, "worker_id": "w", "study_name": "made", "directions": [2]},
    {"op_code": 4, "worker_id": "w", "study_id": 0, "datetime_start": "2026-11-22T10:00:00.000000"},
    {"op_code": 6, "worker_id": "w", "trial_id": 0, "state": 1, "values": [1.0], "datetime_complete": "2026-11-22T10:01:00.0"},
]
AFTERWARDS = st.sampled_from((["show", "resnet18"], ["list"], ["export", "resnet18"], ["go on"], ["go on"]))


@st.composite
def journals(draw: Draw) -> Case:
    """Returns a damaged journal, and a command that reads its study or continues it."""
    content = spoiled(draw, json_lines(damaged_list(draw, JOURNAL)) + b"\n")
    return Case(words=draw(AFTERWARDS), files={"runs/resnet18/optuna.journal": content})


# A study's folder ----------------------------------------------------------------------------------------------------------

OLD_STUDY = Path(__file__).parents[2] / "data/written-by-0.1.0/study.tar.gz"
MADE_DOCUMENTS: dict[str, Any] = {  # documents that the old study lacks
    "tracking.json": {"uri": "sqlite:///mlflow.db", "mirrored": 3, "pending": [4, 5], "problem": "no answer"},
    "owner.json": {"host": "bench", "pid": 1, "started_at": 1_780_000_000.0},
    "explanation.json": {
        "explained": [{"trial": 1, "role": "best", "passes": {}, "phases_s": {"steady": 3.0}, "findings": [], "notes": ["a"]}],
        "checks": [], "accuracy": {"checked": 0, "held": 0},
    },
}  # fmt: skip


def _old_documents() -> dict[str, Any]:
    with tarfile.open(OLD_STUDY) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".json")}
        found = {name: json.load(file) for name, file in files.items() if file}
    return found | {f"mlp/{name}": document for name, document in MADE_DOCUMENTS.items()}


STUDY_DOCUMENTS = _old_documents()
OFTEN = ("mlp/study.json", "mlp/summary.json", "mlp/summary.json", "mlp/trials/0000/trial.json", "mlp/trials/0005/trial.json")
STUDY_DOCUMENT = st.sampled_from((*STUDY_DOCUMENTS, *OFTEN * 4))
FORMATS = st.sampled_from(("yaml", "env", "python", "hf", "lightning", "accelerate", "deepspeed"))
READING = st.sampled_from((
    ["list"], ["list", "--json"], ["show", "mlp"], ["show", "mlp", "--json"], ["show", "mlp", "--trial", "0"],
    ["show", "mlp", "--trial", "5"], ["show", "mlp", "--why"], ["report", "mlp"], ["report", "mlp", "resnet18"],
    ["export", "mlp"], ["prune"], ["prune", "--yes"], ["prune", "mlp"], ["prune", "--older-than", "1d"], ["resume", "mlp"],
    ["resume", "mlp", "study.budget.minutes=90"], ["verify", "mlp"], ["explain", "mlp"], ["sync", "mlp", "--uri", "none"],
))  # fmt: skip


@st.composite
def study_folders(draw: Draw) -> Case:
    """Returns a command that reads a study, and one damaged document of this study."""
    name, words = draw(STUDY_DOCUMENT), list(draw(READING))
    words += ["--format", draw(FORMATS)] if words[0] == "export" else []
    document = damaged(draw, STUDY_DOCUMENTS[name])
    text = as_json(document) if draw(st.booleans()) else json.dumps(document)
    return Case(words=words, files={f"runs/{name}": spoiled(draw, text.encode())})


# Environment, link and traces ----------------------------------------------------------------------------------------------

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "0,GPU-1", "MLFLOW_TRACKING_URI": "http://127.0.0.1:1", "MLFLOW_TRACKING_USERNAME": "me",
    "COLUMNS": "80", "LINES": "20", "TERM": "xterm", "NO_COLOR": "1", "FORCE_COLOR": "1", "SLURM_JOB_ID": "12", "RANK": "1",
    "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2",
    "OMP_NUM_THREADS": "2", "AUTOTUNE_SPEC": '{"schema": 1, "trial": 1}', "AUTOTUNE_SECRETS": '["abc"]',
    "AUTOTUNE_CORES": "0,1", "LD_PRELOAD": "/lib/x.so", "CONDA_PREFIX": "/opt/conda",
    "XDG_CACHE_HOME": "cache", "CXX": "g++",
    "RAY_ADDRESS": "127.0.0.1:1", "RAY_TMPDIR": "ray", "HOME": "home", "PATH": "bin", "PYTHONHASHSEED": "0", "LANG": "C",
    "MY_TOKEN": "s3cret", "TYPER_USE_RICH": "0", "AUTOTUNE_MARK": "a:1", "NCCL_DEBUG": "INFO", "TMPDIR": "tmp",
}  # fmt: skip
NAMES = st.lists(st.sampled_from(tuple(VARIABLES)), min_size=1, max_size=4, unique=True)
CALL = st.sampled_from((
    ["show", "resnet18"], ["list"], ["knobs", "--json"], ["export", "resnet18"], [*RUN, *RECIPE], [*RUN, *COMMAND],
    ["apply", "best.yaml", "--", "python", "train.py"], ["apply", "recipe.yaml"], ["functions"], ["functions"],
    ["run", "--help"], ["sync", "resnet18", "--uri", "none"],
))  # fmt: skip


@st.composite
def environments(draw: Draw) -> Case:
    """Returns a command and variables that autotune may read, with odd values."""
    env = {name: draw(TEXTS) if draw(st.booleans()) else spoiled_text(draw, VARIABLES[name]) for name in draw(NAMES)}
    return Case(words=list(draw(CALL)), env={name: word(value).replace("\0", "") for name, value in env.items()})


HELLO = {"is": "hello", "autotune": "0.1.0", "package": "/p", "host": "n1", "boot_id": "b", "cores": [0, 1], "job": "12"}
WATCHED = {
    "disturbances": [{"kind": "cpu", "amount": 1.0, "limit": 0.1, "words": "hog"}], "metrics": {"load": 1.0}, "used_frac": 0.5,
    "cpu_use": {"seconds": 3.0, "num_cores": 2.0, "own_cores": 1.0, "culprits": [[1, 0.5]]},
}  # fmt: skip
ENDED = {
    "exit_code": 0, "signal": None, "cause": "result", "phase": "exit", "problems": [], "seconds": 3.0, "start": "fresh",
    "spared_s": 0.0, "evidence": {"log_tail": "", "num_steps": 3, "is_harness_seen": True},
    "results": [{"schema": 1, "trial": 7, "nonce": "made", "rank": 0, "world_size": 1, "pid": 9, "status": "measured"}],
}  # fmt: skip
TO_TUNER = [
    HELLO, {"re": 0, "facts": MACHINE, "given": []}, {"re": 99}, {"re": 1}, BEAT,
    {"re": 2, "progress": {"time_s": 1.0, "phase": "steady", "step": 7}},
    {"is": "ended", "nonce": "made", "ended": ENDED, "watched": WATCHED}, {"re": 3, "over": None},
]  # fmt: skip
TO_AGENT = [
    {"do": "open", "id": 0, "environment": {"PATH": "/usr/bin:/bin"}, "cwd": "/", "program": "sh", "runs_dir": "/", "slot": "",
     "token": "tmp", "note": "", "device": ["cpu", 0, 1], "graces": {"kill_s": 0.1}},
    {"do": "sweep", "id": 1, "study": "/nosuch"},
    {"do": "start", "id": 3, "launch": from_launch(a_launch(Path("/nosuch/trial"), ["true"]), 0.0)},
    {"do": "progress", "id": 4}, BEAT, {"do": "stop", "id": 5, "reason": "done"},
]  # fmt: skip
SIDE = st.sampled_from(("tuner", "agent"))
LENGTHS = st.sampled_from((None,) * 12 + (0, 1, 200, 1 << 30, (1 << 32) - 1))


def _frame(draw: Draw, message: Any) -> bytes:
    data, length = json.dumps(message).encode(), draw(LENGTHS)
    return struct.pack(">I", len(data) if length is None else length) + data


@st.composite
def messages(draw: Draw) -> Case:
    """Returns damaged messages that one side of the link reads until the pipe ends."""
    side = draw(SIDE)
    made = damaged_list(draw, TO_TUNER if side == "tuner" else TO_AGENT)
    content = START + b"".join(_frame(draw, message) for message in made)
    return Case(words=["link", side], files={"bytes": spoiled(draw, content)[: 1 << 15]})


def _trace() -> dict[str, Any]:
    made, tensors = passes.Kineto(), [[1, 3, 8, 8], [4, 3, 3, 3]]
    for start in (0.0, 20.0):
        made.step(int(start), start, 18)
        made.phase("forward", start, 9)
        made.operator("aten::mm", start + 1, 3, [[8, 4], [4, 8]], ["float", "float"])
        values = {"Concrete Inputs": ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]}
        made.operator("aten::convolution", start + 4, 3, tensors, ["float", "float"], **values)
        made.kernel("ampere_sgemm_128x64_nn", start + 2, 2, launched=start + 1.5)
        made.copy("Memcpy HtoD", start + 10, 1)
    return made.document


PLACE = {"file": "/p/train.py", "line": 3, "function": "main", "count": 2}
COMPILED = Compiled([{**PLACE, "reason": "shape", "seconds": 0.1}], [{**PLACE, "reason": "print"}], 0.1)
TRACE = "trace.rank0.json"
DOCUMENTS = {
    TRACE: _trace(), "explained.trace.rank0.json": asdict(passes.traced(file=TRACE, device="cuda")),
    "explained.lines.rank0.json": asdict(passes.lines(compiled=COMPILED)),
    "explained.memory.rank0.json": asdict(passes.memory(timeline=[[0.1, 500, 900]], at_peak=[{**PLACE, "bytes": 400}])),
}  # fmt: skip
DOCUMENT = st.sampled_from((*DOCUMENTS, TRACE, TRACE, TRACE))


@st.composite
def traces(draw: Draw) -> Case:
    """Returns the files that the passes of `explain` write, one of them damaged: most often the profiler's trace."""
    name = draw(DOCUMENT)
    files = {f"passes/{each}": json_lines([document]) for each, document in DOCUMENTS.items()}
    content = spoiled(draw, json_lines([damaged(draw, DOCUMENTS[name])]))
    if name == TRACE and draw(st.booleans()):
        content = spoiled(draw, gzip.compress(content, 1, mtime=0))
    return Case(words=["explained"], files={**files, f"passes/{name}": content})


KINDS: dict[str, st.SearchStrategy[Case]] = {
    "overrides": overrides(), "command lines": command_lines(), "yaml": yaml_files(), "tables": tables(),
    "journals": journals(), "study folders": study_folders(), "environment": environments(),
    "link": messages(), "traces": traces(),
}  # fmt: skip
