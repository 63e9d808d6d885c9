"""Records a table on which searches are replayed: `python -m tests.benchmarks.replay_tables NAME -o FILE`.

The same command continues an interrupted recording. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

HERE = "tests.benchmarks.replay_tables"
# Every combination is measured. Each knob has a few values, far enough apart that the choice matters and a random search does
# not find the best configuration soon.
TABLES = {
    "mlp": [
        *("model=mlp", "data=tabular", "loader.batch_size=choice(8,32,128,512)", "loader.num_workers=choice(0,1,2)"),
        *("precision.amp=choice(off,bf16)", "optimizer.implementation=choice(default,fused)"),
    ],
    # The limit is just above the memory of the best configuration. Most configurations with batches of 512 and 2048 exceed it.
    "convnet": [
        *(f"model.factory={HERE}.convnet:build_model", f"data.factory={HERE}.convnet:build_data"),
        *("loader.batch_size=choice(4,32,512,2048)", "loader.num_workers=choice(0,1,2)", "threads.intra=choice(1,2)"),
        *("precision.amp=choice(off,bf16)", "device.memory_limit=1.05GiB"),
    ],
    # `convnet` with a higher limit. The best configuration takes 0.96 of it. In `convnet`, it sometimes exceeds the limit.
    "memory": [
        *(f"model.factory={HERE}.convnet:build_model", f"data.factory={HERE}.convnet:build_data"),
        *("loader.batch_size=choice(4,16,32,512,1024,2048)", "loader.num_workers=choice(0,2)", "threads.intra=choice(1,2)"),
        *("precision.amp=choice(off,bf16)", "device.memory_limit=1.12GiB"),
    ],
    # Another net. The best configuration takes 0.94 of the limit; the same configuration in fp32 takes 1.05.
    "deep": [
        *(f"model.factory={HERE}.convnet:build_deep_model", f"data.factory={HERE}.convnet:build_data"),
        *("loader.batch_size=choice(4,16,32,512,1024,2048)", "loader.num_workers=choice(0,2)", "threads.intra=choice(1,2)"),
        *("precision.amp=choice(off,bf16)", "device.memory_limit=1.09GiB"),
    ],
    # A larger net than `mlp`: threads and bf16 matter more.
    "wide": [
        *("model=mlp", "model.num_layers=6", "model.hidden_size=768", "data=tabular"),
        *("loader.batch_size=choice(4,16,32,128,256,1024)", "loader.num_workers=choice(0,2)", "threads.intra=choice(1,2)"),
        "precision.amp=choice(off,bf16)",
    ],
    "transformer": [
        *("model=gpt2_small", "model.num_layers=2", "model.hidden_size=64", "model.vocab_size=2000"),
        *("data.sequence_length=16", "loader.batch_size=choice(2,8,32,256)", "loader.num_workers=choice(0,1,2)"),
        *("threads.intra=choice(1,2)", "precision.amp=choice(off,bf16)"),
    ],
    "resnet18": [
        *("model=resnet18", "model.image_size=96", "data=photos", "loader.batch_size=choice(1,2,4,8,32)"),
        *("threads.intra=choice(1,2)", "precision.amp=choice(off,bf16)", "layout.channels_last=choice(false,true)"),
    ],
    # 336 configurations, of which ten trials see only a small part.
    "images": [
        *(f"model.factory={HERE}.convnet:build_model", f"data.factory={HERE}.convnet:build_data"),
        *("loader.batch_size=choice(2,4,8,16,32,64,128)", "loader.num_workers=choice(0,1,2)", "threads.intra=choice(1,2)"),
        *("precision.amp=choice(off,bf16)", "layout.channels_last=choice(false,true)"),
        "optimizer.implementation=choice(default,fused)",
    ],
    # 336 configurations, half of which compile.
    "compiled": [
        *("model=mlp", "model.num_layers=6", "model.hidden_size=768", "data=tabular"),
        *("loader.batch_size=choice(8,16,32,64,128,256,512)", "loader.num_workers=choice(0,1,2)", "threads.intra=choice(1,2)"),
        *("precision.amp=choice(off,bf16)", "compile.mode=choice(off,default)"),
        "optimizer.implementation=choice(default,fused)",
    ],
}
# In large tables, each configuration is measured twice and briefly, and a disturbed trial is not repeated. Longer windows would
# take hours longer and gain little, because the rates of two processes differ by more than windows of one process.
LARGE = ("images", "compiled")
BRIEF = [
    *("measure.screening.warmup_min_device_s=0.5", "measure.screening.min_s=1", "measure.screening.half_width_frac=0.05"),
    *("measure.screening.promoted_half_width_frac=0.03", "measure.screening.promoted_max_s=3", "measure.screening.max_s=3"),
    "measure.quiet=false",
]


def main() -> int:
    """Records one table."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(TABLES))
    parser.add_argument("-o", "--out", required=True, help="the table's file, .jsonl.gz")
    parser.add_argument("--minutes", type=float, default=40, help="time limit of this run")
    options = parser.parse_args()
    is_large = options.name in LARGE
    about = [
        *(("record.configurations=400", "record.repeats=2", "launch.warm=auto", *BRIEF) if is_large else ()),
        *(() if is_large else ("record.configurations=48", "record.repeats=3")),
        "record.repeats_of_best=5",
        "search_space=none",
        "tracker.uri=none",
        f"study.name={options.name}",
    ]
    command = [sys.executable, "-m", "autotune", "record", *TABLES[options.name], *about]
    return subprocess.call([*command, f"record.minutes={options.minutes:g}", "-o", options.out])


if __name__ == "__main__":
    sys.exit(main())
