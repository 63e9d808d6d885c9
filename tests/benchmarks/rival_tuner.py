"""The model and the batch of image_program.py in the hands of pytorch-autotune, by its public interface.

    PYTORCH_AUTOTUNE_CACHE=FILE python rival_tuner.py --search 300               # tunes, and keeps the winner
    PYTORCH_AUTOTUNE_CACHE=FILE python rival_tuner.py --skip-s 3 --seconds 20    # trains with it, by the same stopwatch

What it tries and when is on its standard output as it goes. The last line is JSON: of a search {"baseline_per_s", "rate_per_s"
(its own figure), "seconds", "winner", "trials"}, else as image_program.py's.
"""

import json

import image_program
import pytorch_autotune


def main() -> None:
    """Searches, or trains with what a search has found."""
    parser = image_program.build_parser()
    parser.add_argument("--search", type=float, help="seconds of its budget")
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
    """Returns what a search came to."""
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
