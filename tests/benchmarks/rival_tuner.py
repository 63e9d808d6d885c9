"""Tunes the training of image_program.py's model on its fixed batch with pytorch-autotune, through its public interface.

    PYTORCH_AUTOTUNE_CACHE=FILE python rival_tuner.py --search 300               # tunes, and stores the winner
    PYTORCH_AUTOTUNE_CACHE=FILE python rival_tuner.py --skip-s 3 --seconds 20    # trains with the winner and measures the rate

A search prints each trial when it is made. The last line is JSON: after a search {"baseline_per_s", "rate_per_s" (measured by
pytorch-autotune), "seconds", "winner", "trials"}, otherwise the same keys as image_program.py prints.
"""

import json

import image_program
import pytorch_autotune


def main() -> None:
    """Searches, or trains with the winner of a search."""
    parser = image_program.build_parser()
    parser.add_argument("--search", type=float, help="search with a budget of this many seconds")
    options = parser.parse_args()
    model = image_program.make_model(options.model)
    images, labels = image_program.make_batch(options.batch, options.size, options.device)
    result = pytorch_autotune.autotune(
        model,
        (images, labels),
        optimizer="adamw",
        budget=int(options.search or 0),
        device=options.device,
        cache="refresh" if options.search else True,
    )
    if options.search:
        print(json.dumps(report(result, options.batch)))
        return
    if result.report.trials:
        raise SystemExit("no winner is kept for this model, batch and device: search first")

    def step() -> None:
        result.step(images, labels)

    found = image_program.rate(step, options.batch, options.device, skip_s=options.skip_s, seconds=options.seconds)
    print(json.dumps(found))


def report(result: pytorch_autotune.AutotuneResult, batch: int) -> dict[str, object]:
    """Returns the result of a search."""
    said = result.report.to_dict()
    best_ms = min(trial["ms_per_step"] for trial in said["trials"] if trial["config"] == said["winner"])
    return {
        "baseline_per_s": batch * 1e3 / said["baseline_ms"],
        "rate_per_s": batch * 1e3 / best_ms,
        "seconds": said["total_s"],
        "winner": result.config.label,
        "trials": said["trials"],
    }


if __name__ == "__main__":
    main()
