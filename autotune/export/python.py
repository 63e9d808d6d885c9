"""Exports Python source that sets the knobs: short definitions to import or to paste into a training script."""

from __future__ import annotations

import shlex

from autotune.export.document import MAX_COPIED, Exported, left_out_line
from autotune.export.in_code import ddp_keys, loader_arguments, loader_keys
from autotune.export.winner import Winner
from autotune.knobs.catalogue import knob
from autotune.plain_text import one_line
from autotune.records import Knobs

# Knobs set by a statement when the program starts.
AT_START = (
    *("threads.intra", "threads.interop", "loader.sharing_strategy", "memory.fraction", "precision.matmul"),
    "backend.cudnn_benchmark",
)
COMPRESSION = "parallel.gradient_compression"
FORCED = "multiprocessing_context as in the trial: this program's workers cannot be started in Python's default way."
OPTIMIZER, LAYOUT, AMP = "optimizer.implementation", "layout.channels_last", "precision.amp"
COMPILE, DYNAMIC, SCOPE = "compile.mode", "compile.dynamic", "compile.scope"
DYNAMICS = {"true": "dynamic=True", "false": "dynamic=False"}  # "auto" needs no argument
# Knobs that the exported definitions set, besides the loader's.
IN_PARTS = {*AT_START, OPTIMIZER, LAYOUT, COMPILE, DYNAMIC, SCOPE, AMP}


def render(winner: Winner) -> Exported:
    """Returns Python source that defines `BEST` and functions that apply it. Importing the source changes nothing."""
    knobs = winner.active
    parts = [
        _head(winner),
        _best(winner),
        _loader(winner),
        _optimizer(knobs),
        _start(knobs),
        _model(knobs),
        _parallel(knobs),
        _inputs(knobs),
        _amp(knobs),
    ]
    return Exported(text="".join(parts))


def _head(winner: Winner) -> str:
    lines = [*winner.headline, "", "Import this file into the training script, or paste what is needed."]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comments + ("\nimport torch\n" if any(key in AT_START or key in (LAYOUT, AMP) for key in winner.active) else "")


def _best(winner: Winner) -> str:
    """Returns the dictionary of all knobs, and comments on those that must be set outside this file."""
    lines = ["", "# Every setting as it was measured.", "BEST = {"]
    lines += [f"    {key!r}: {value!r}," for key, value in winner.active.items()]
    lines.append("}")
    if winner.variables:
        lines.append("# Before Python starts, in the shell:")
        exports = [f"export {name}={shlex.quote(text)}" for name, text in winner.variables.items()]
        lines += [f"#   {one_line(line, MAX_COPIED)}" for line in exports]
    in_code = {*IN_PARTS, *loader_keys(winner.in_program)}
    others = [key for key in winner.in_program if key not in (*in_code, *ddp_keys(winner.in_program), COMPRESSION)]
    lines += [f"# {left_out_line(key, winner.active[key])}" for key in others]
    return "\n".join([*lines, ""])


def _loader(winner: Winner) -> str:
    if not (given := loader_arguments(winner.active)):
        return ""
    why = f"# {FORCED}\n" if winner.forced else ""
    return f"\n# The DataLoader that trains: DataLoader(dataset, shuffle=True, **LOADER)\n{why}LOADER = {given!r}\n"


def _optimizer(knobs: Knobs) -> str:
    if (value := knobs.get(OPTIMIZER)) is None:
        return ""
    given = {} if value == "default" else {str(value): True}
    return f"\n# torch.optim.AdamW(model.parameters(), lr=lr, **OPTIMIZER), or your optimizer's class\nOPTIMIZER = {given!r}\n"


def _start(knobs: Knobs) -> str:
    body = [knob(key).code_of(knobs[key]) for key in AT_START if key in knobs]
    return _function("start()", "Sets the process-wide settings; call it first.", body) if body else ""


def _model(knobs: Knobs) -> str:
    """Returns the function that prepares the model: first the layout, then compilation, both before DDP."""
    body = []
    if LAYOUT in knobs:
        body.append(f"model = model.to(memory_format=torch.{'channels_last' if knobs[LAYOUT] else 'contiguous_format'})")
    if (mode := knobs.get(COMPILE)) is not None:
        arguments = ["" if mode == "default" else f"mode={mode!r}", DYNAMICS.get(str(knobs.get(DYNAMIC)), "")]
        compiled = f"compile({', '.join(filter(None, arguments))})"
        if mode == "off":
            body.append("# not compiled: nothing to do")
        elif knobs.get(SCOPE) == "blocks":
            body += ["for block in model.layers:  # put your model's list of repeated blocks here", f"    block.{compiled}"]
        else:
            body.append(f"model.{compiled}")
    said = "Returns the model ready to train; call it once, before DistributedDataParallel and the optimizer."
    return _function("prepare(model)", said, [*body, "return model"]) if body else ""


def _parallel(knobs: Knobs) -> str:
    """Returns the arguments of DistributedDataParallel, and the function that compresses gradients between the ranks."""
    given = {knob(key).name: knobs[key] for key in ddp_keys(knobs)}
    text = f"\n# DistributedDataParallel(model, **PARALLEL)\nPARALLEL = {given!r}\n" if given else ""
    if knobs.get(COMPRESSION) != "bf16":
        return text
    body = [
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook",
        "",
        "model.register_comm_hook(None, bf16_compress_hook)",
    ]
    return text + _function("compress(model)", "Call it once, on the DistributedDataParallel, before training.", body)


def _inputs(knobs: Knobs) -> str:
    body = ["return images.to(memory_format=torch.channels_last)"]
    return (
        _function("prepare_images(images)", "Returns a batch of images in the model's layout.", body)
        if knobs.get(LAYOUT)
        else ""
    )


def _amp(knobs: Knobs) -> str:
    if (value := knobs.get(AMP)) is None:
        return ""
    said = (
        'Returns the context for a forward pass: `with autocast("cuda"): output = model(inputs)`; use output.float() in losses.'
    )
    dtype, enabled = ("float16" if value == "fp16" else "bfloat16"), ("" if value != "off" else ", enabled=False")
    body = ["# Scale the loss, too: torch.amp.GradScaler(device_type)."] if value == "fp16" else []
    body.append(f"return torch.autocast(device_type, dtype=torch.{dtype}{enabled})")
    return _function("autocast(device_type)", said, body)


def _function(signature: str, said: str, body: list[str]) -> str:
    return "\n".join(["", "", f"def {signature}:", f'    """{said}"""', *(f"    {line}" for line in body), ""])
