"""Implements `autotune replay`: runs search strategies on recorded tables and compares them."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as Grid
from rich.text import Text

from autotune.cli.terminal import console, print_json
from autotune.errors import BadInput
from autotune.quantities import DASH, number_text, percent_text, seconds_text
from autotune.wording import changes_phrase

HEAD = ("strategy", "10", "20", "40", "p10", "time", "to 95", "p90", "to 98", "final", "memory", "claims")


def replay(
    tables: Sequence[Path],
    *,
    samplers: str | None,
    seeds: int,
    trials: int | None,
    minutes: float | None,
    jobs: int | None,
    as_json: bool,
    is_raw: bool,
    as_markdown: bool = False,
) -> int:
    """Replays the tables and prints the figures; returns the exit status.

    Raises:
        BadInput: a table, a strategy or a combination of options cannot be used.
    """
    from autotune.harness.cores import num_cores
    from autotune.replay.bench import USUAL, Asked, run
    from autotune.replay.columns import markdown
    from autotune.replay.figures import figures, raw
    from autotune.replay.strategies import names
    from autotune.replay.study import Limits

    if not tables:
        raise BadInput("TABLE: nothing to replay. Give files that `autotune record` wrote: tests/data/replay/*.jsonl.gz.")
    if is_raw and not as_json:
        raise BadInput("--raw: has an effect only together with --json. Give both, or neither.")
    if as_markdown and as_json:
        raise BadInput("--markdown: cannot be combined with --json. Give one of them.")
    if minutes is not None and not math.isfinite(minutes):
        raise BadInput(f"--minutes: not a length of time, got {minutes}. Give minutes: --minutes 5.")
    asked = Asked(
        tables=list({path.resolve(): path for path in tables}.values()),
        strategies=USUAL if samplers is None else names(samplers),
        num_seeds=seeds,
        limits=Limits(trials=trials, minutes=minutes),
        num_jobs=jobs or max(1, int(num_cores())),
    )
    results = run(asked, _progress(asked) if not as_json and sys.stderr.isatty() else lambda: None)
    found = figures(results)
    if as_json:
        print_json({**found, **({"studies": raw(results)} if is_raw else {})})
    elif as_markdown:
        print(markdown(found["strategies"]))
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    """Prints the figures of each table, and of all tables together."""
    from autotune.replay.columns import agreeing

    out = console()
    for table in found["tables"]:
        out.print()
        out.print(Text(f"{table['table']}  ({table['file']})", style="bold"))
        for line in _about(table):
            out.print(Text(line, style="dim"))
        out.print(_grid(table["strategies"]))
    if len(found["tables"]) > 1:
        out.print()
        out.print(Text(f"all {len(found['tables'])} tables together", style="bold"))
        out.print(_grid(found["strategies"]))
        for name, figure in found["strategies"].items():
            worst = figure["worst_table"]
            reached = f"worst table {worst['table']}, {_percent(worst['median_at_20'])} after 20 trials"
            out.print(Text(f"  {_label(name)}: {reached}", style="dim"))
    for line in _losses(found["losses"]):
        out.print(Text(line))
    first, figure = next(iter(found["strategies"].items()))
    if figure["calibration"]["verifiable"]:
        out.print(Text(f"{_label(first)}: a later verify agrees with {agreeing(figure)} claimed speed-ups"))
    out.print()
    out.print(Text(LEGEND, style="dim"))


_percent = functools.partial(percent_text, digits=1)
LEGEND = (
    "10, 20, 40: median percentage of the optimum after that many trials, judged by measurements that the search did not see. "
    "p10: 10th percentile after 20 trials. time: like '20', but after the time that 20 trials take on average on this table. "
    "to 95, to 98: median number of trials until the best so far reaches 95 or 98 % of the optimum and stays there; trials of "
    "the finals' choosing rounds and of the attribution count, too. p90: like 'to 95', but the 90th percentile. "
    "final: median for the configuration that the study ends with. "
    "memory: percentage of the first 20 trials that ran out of memory. "
    "claims: percentage of the claimed speed-ups that a later verify agrees with."
)


def _progress(asked: Any) -> Any:
    total, done = len(asked.tables) * len(asked.strategies) * asked.num_seeds, [0]

    def tell() -> None:
        done[0] += 1
        end = "\n" if done[0] == total else ""
        print(f"\rreplayed {done[0]} of {total} studies", end=end, file=sys.stderr, flush=True)

    return tell


def _about(table: dict[str, Any]) -> list[str]:
    """Returns lines on a table: its size, noise and optimum, and whether it separates good searches from random ones."""
    best, memory = table["optimum"], table["memory"]
    left_out = "" if table["recorded"] == table["configurations"] else f" of {table['recorded']} (those that form a full grid)"
    over = f", {best['over_baseline']:.2f}x the baseline" if best["over_baseline"] else ""
    lines = [
        f"  {table['configurations']} configurations{left_out} x {table['repeats']:g} repeats, "
        f"spread {_percent(table['spread_frac'])}, {seconds_text(table['seconds_per_trial'])} a trial",
        f"  optimum {number_text(best['value'])} {table['unit']}/s{over}: {changes_phrase(best['changed'])}",
    ]
    verdict = "separates good searches from random ones" if table["is_worth"] else "too easy to separate searches"
    lines.append(f"  ten random trials reach {_percent(table['random_after_10'])} of the optimum: {verdict}")
    if table["disturbed"]:
        lines.append(f"  {table['disturbed']} measurements were disturbed by other load on the machine")
    if table["measured_once"]:
        once = "1 configuration was" if table["measured_once"] == 1 else f"{table['measured_once']} configurations were"
        lines.append(f"  {once} measured only once: noise and true rate cannot be separated")
    if memory["out_of_memory"]:
        filled = f", the optimum uses {_percent(memory['optimum_frac'])} of the memory" if memory["optimum_frac"] else ""
        lines.append(f"  {memory['out_of_memory']} configurations run out of memory{filled}")
    return lines


def _losses(losses: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one line for each table and time at which the first strategy is behind another."""
    return [
        f"{_label(loss['strategy'])} is behind {_label(loss['rival'])} on {loss['table']} after the time of "
        f"{loss['trials']} trials: {_percent(loss['own'])} against {_percent(loss['other'])}"
        for loss in losses
    ]


def _grid(strategies: dict[str, dict[str, Any]]) -> Grid:
    made = Grid(box=None, padding=(0, 1, 0, 0), header_style="dim")
    made.add_column(HEAD[0], overflow="fold", min_width=14)
    for head in HEAD[1:]:
        made.add_column(head, justify="right", no_wrap=True)
    for name, found in strategies.items():
        trials, reach = found["at_trials"], found["to"]
        shares = [trials[num]["median"] for num in ("10", "20", "40")]
        shares += [trials["20"]["p10"], found["at_seconds_of_trials"]["20"]["median"]]
        counts = [reach["0.95"]["trials"]["median"], reach["0.95"]["trials"]["p90"], reach["0.98"]["trials"]["median"]]
        last = [found["final"]["median"], found["out_of_memory_frac"]["20"], found["calibration"]["verified_frac"]]
        made.add_row(_label(name), *map(_share, shares), *map(_count, counts), *map(_share, last))
    return made


def _label(name: str) -> str:
    """Returns a strategy's name with spaces at which it can wrap: "default: memory_model off"."""
    return name.replace(":", ": ").replace("search.", "").replace("=false", " off")


def _share(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f}"


def _count(value: float | None) -> str:
    return DASH if value is None else f"{value:.0f}"
