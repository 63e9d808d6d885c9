"""Loads exported files with their libraries in one process and prints the results as JSON: `python libraries.py FOLDER`.

The result of a library is what it read, or the error it raised.
"""

import contextlib
import dataclasses
import io
import json
import sys
import traceback
from pathlib import Path

FOLDER = Path(sys.argv[1])


def hugging_face():
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    names = (
        "per_device_train_batch_size", "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory",
        "dataloader_persistent_workers", "bf16", "tf32", "torch_compile", "torch_compile_mode", "optim", "use_cpu",
    )  # fmt: skip
    read = {}
    for name, parse in (("yaml", parser.parse_yaml_file), ("json", parser.parse_json_file)):
        (arguments,) = parse(str(FOLDER / f"hf.{name}"))
        read[name] = {key: getattr(arguments, key) for key in names}
    return {**read, "fields": [field.name for field in dataclasses.fields(TrainingArguments)]}


def lightning():
    import torch
    import yaml
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.cli import LightningCLI

    text = (FOLDER / "lightning.yaml").read_text()
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = Trainer(**yaml.safe_load(text)["trainer"], **quiet)
    arguments = [f"--config={FOLDER / 'lightning.yaml'}", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = LightningCLI(LightningModule, args=arguments, run=False, save_config_callback=None)
    _, _, rest = text.partition("DataLoader(dataset")
    lines = [line.removeprefix("# ") for line in rest.splitlines()[1:] if not line.startswith(("# Not", "#   "))]
    loader = torch.utils.data.DataLoader(range(256), shuffle=True, **yaml.safe_load("\n".join(lines)))
    return {
        "trainer": [trainer.precision, torch.backends.cudnn.benchmark],
        "cli": [cli.trainer.precision, cli.config["trainer"]["benchmark"]],
        "loader": [loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.pin_memory],
    }


def accelerate():
    from accelerate.commands.config.config_args import load_config_from_file

    read = {}
    for name in ("yaml", "json"):
        found = load_config_from_file(str(FOLDER / f"accelerate.{name}"))
        read[name] = {
            "mixed_precision": found.mixed_precision, "distributed_type": found.distributed_type.value,
            "num_processes": found.num_processes, "use_cpu": found.use_cpu, "dynamo_config": found.dynamo_config,
        }  # fmt: skip
    return read


def deepspeed():
    from deepspeed.runtime.config import DeepSpeedConfig

    found = DeepSpeedConfig(str(FOLDER / "deepspeed.json"))
    return {
        "micro_batch": found.train_micro_batch_size_per_gpu,
        "autocast": [found.torch_autocast_enabled, str(found.torch_autocast_dtype)],
        "bf16": found.bfloat16_config.enabled,
    }


def main():
    answers = {}
    for ask in (hugging_face, lightning, accelerate, deepspeed):
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed logs there
            try:
                answers[ask.__name__] = ask()
            except BaseException:
                answers[ask.__name__] = traceback.format_exc()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
