"""Writes the figures and curves of a replay as one self-contained HTML file: no network, no scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.quantities import number_text
from autotune.replay.bench import Result
from autotune.replay.columns import COLUMNS, cells, percent
from autotune.replay.figures import curves
from autotune.wording import changes_phrase

# Okabe and Ito's palette, safe for colour-blind readers. When all colours are used, dashed lines follow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A6D00")
DASHES = ("", "6 3", "2 3")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 320, 52, 40, 12, 12
Y_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
NUM_X_TICKS = 5
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2.2rem 0 .3rem}p{margin:.2rem 0;color:#555}
.charts{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:.6rem 0}figcaption{color:#555;text-align:center;font-size:.9rem}
table{border-collapse:collapse;margin:.6rem 0;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .45rem;text-align:right;border-bottom:1px solid #e3e3e3;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{font-weight:600;color:#555}
svg text{font:12px system-ui,sans-serif;fill:#555}.scroll{overflow-x:auto}
.key{display:inline-block;margin-right:1.2rem;white-space:nowrap}.key svg{vertical-align:middle}
"""
Curve = Sequence[tuple[float, float, float]]


def page(found: dict[str, Any], results: Sequence[Result]) -> str:
    """Returns figures and curves as an HTML page."""
    names = list(found["strategies"])
    parts = [f"<h1>Replayed searches</h1><p>{html.escape(EXPLAINED)}</p>{_legend(names)}"]
    if len(results) > 1:
        parts.append(f"<h2>All tables together</h2>{_figures(found['strategies'])}")
    for result, table in zip(results, found["tables"], strict=True):
        best = table["optimum"]
        words = "; ".join(
            (
                f"{table['configurations']} configurations x {table['repeats']:g} repeats",
                f"spread {percent(table['spread_frac'])}",
                f"optimum {number_text(best['value'])} {table['unit']}/s: {changes_phrase(best['changed'])}",
                f"ten random trials reach {percent(table['random_after_10'])} of it",
            )
        )
        if table["memory"]["out_of_memory"]:
            words += f"; {table['memory']['out_of_memory']} configurations run out of memory"
        by = curves(result)
        charts = "".join(
            f"<figure>{_chart(by[axis], names, axis)}<figcaption>{caption}</figcaption></figure>"
            for axis, caption in (("trials", "search trials"), ("seconds", "recorded seconds, baseline included"))
        )
        parts.append(f"<h2>{html.escape(table['table'])}</h2><p>{html.escape(words)}</p><div class=charts>{charts}</div>")
        parts.append(_figures(table["strategies"]))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Replayed searches</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


EXPLAINED = (
    "Each curve shows the true rate of the best configuration so far, as a fraction of the optimum's. The true rate is taken "
    "from recorded repeats that the search did not see. The thick line is the median over the seeds, the thin line the 10th "
    "percentile. In time of 10: the fraction reached in the time of 11 average trials, baseline included. To 95 %: trials or "
    "seconds until the best so far reaches 95 % of the optimum and stays there, including the finals' choosing rounds and the "
    "ablation. Trials: number of search trials. Final: rate of the configuration that the study ends with. Out of memory: "
    "share of the first 20 trials that ran out of it. Verified: claimed speed-ups that a later verify agrees with. "
    "Overstated: by how much the winner's reported rate exceeds its true rate, in the median."
)


def _legend(names: Sequence[str]) -> str:
    keys = [
        f'<span class=key><svg width="34" height="10"><line x1="0" y1="5" x2="30" y2="5" {_stroke(place)}/></svg>'
        f"{html.escape(name)}</span>"
        for place, name in enumerate(names)
    ]
    return f"<p>{''.join(keys)}</p>"


def _stroke(place: int, width: float = 2.2) -> str:
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[place % len(COLOURS)]}" stroke-width="{width}" fill="none"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _chart(by_name: Mapping[str, Curve], names: Sequence[str], axis: str) -> str:
    """Returns an SVG step chart: a fraction holds until a better one is found."""
    last = max((curve[-1][0] for curve in by_name.values() if curve), default=1.0) or 1.0

    def x(value: float) -> float:
        return LEFT + value / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (1 - _stretched(value)) * (HEIGHT - TOP - BOTTOM)

    lines = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e3e3e3"/>'
        f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{100 * tick:.0f} %</text>'
        for tick in Y_TICKS
    ]
    for value in _ticks(last):
        lines.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:.0f}</text>')
    for place, name in reversed(list(enumerate(names))):  # draws the first on top
        curve = by_name[name]
        for column, width in ((2, 0.8), (1, 2.2)):
            path = _steps([(x(point[0]), y(min(1.0, point[column]))) for point in curve])
            lines.append(f'<path d="{path}" {_stroke(place, width)}><title>{html.escape(name)}, by {axis}</title></path>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(lines)}</svg>'


def _ticks(last: float) -> list[float]:
    """Returns about NUM_X_TICKS round numbers from 0 to `last`."""
    power = 10.0 ** math.floor(math.log10(last / NUM_X_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * NUM_X_TICKS >= last)
    return [step * number for number in range(int(last / step) + 1)]


def _stretched(value: float) -> float:
    """Returns the height of a fraction: values above 0.8, where searches differ, fill the upper half of the chart."""
    return value / 0.8 * 0.5 if value < 0.8 else 0.5 + (value - 0.8) / 0.2 * 0.5


def _steps(points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return ""
    (first_x, first_y), *rest = points
    return f"M{first_x:.1f},{first_y:.1f}" + "".join(f"H{px:.1f}V{py:.1f}" for px, py in rest)


def _figures(strategies: dict[str, dict[str, Any]]) -> str:
    heads = ("strategy", *(head for head, _ in COLUMNS))
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for name, found in strategies.items():
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in (html.escape(name), *cells(found)))}</tr>")
    return f"<div class=scroll><table>{''.join(rows)}</table></div>"
