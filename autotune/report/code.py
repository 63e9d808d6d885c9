"""Prepares the best configuration in every export format, to paste or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import BadInput
from autotune.export.formats import FORMATS, render
from autotune.report.study import Study
from autotune.report.verdict import has_winner

USES = {
    "python": "lines for the training script",
    "yaml": "the file for `autotune apply`, `autotune verify` and Hydra",
    "env": "environment variables, for a shell",
    "hf": "TrainingArguments of Hugging Face",
    "lightning": "configuration of LightningCLI",
    "accelerate": "configuration of Accelerate",
    "deepspeed": "configuration of DeepSpeed",
}


@dataclass(frozen=True, kw_only=True)
class Code:
    """The best configuration in one format.

    Attributes:
        format: name of the format.
        use: what it is for.
        text: the file.
        left_out: settings that the format cannot express, and how to set them instead.
    """

    format: str
    use: str
    text: str
    left_out: Sequence[str] = ()


def codes(study: Study) -> list[Code]:
    """Returns the best configuration in every format, the Python code first.

    Returns [] if nothing changes, or if the study is a verification or a recording.
    """
    if not has_winner(study.summary) or study.summary.get("verification") or study.summary.get("recording"):
        return []
    names = sorted(FORMATS, key=lambda name: list(USES).index(name) if name in USES else len(USES))
    made = []
    for name in names:
        try:
            exported = render(study.summary, name, None)
        except (BadInput, AttributeError, KeyError, TypeError, ValueError):  # a summary of another version
            continue
        left_out = exported.left_out if exported.header else ()  # if there is no header, comments in the text list them
        made.append(Code(format=name, use=USES.get(name, ""), text=exported.text.rstrip(), left_out=left_out))
    return made
