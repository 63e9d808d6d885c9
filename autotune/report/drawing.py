"""Draws charts as SVG and HTML, without scripts and without inline styles. x is in percent, y in pixels.

A chart is as wide as its container, and its text is never scaled. A bar chart is a list of rows, each with text and a drawn
track. A plot is one drawing whose marks are placed at percentages of its width. Colours are classes of style.css.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

TRACK_PX = 22  # height of the track of a bar chart's row
PLOT_PX, TOP_PX, BOTTOM_PX = 260, 14, 24  # height of a plot, and its margins for axis labels
NEAR_EDGE_FRAC = 0.08  # texts closer to an edge than this share of the width are aligned with it
MAX_TITLED = 300  # if there are more marks than this, none has a tooltip: the file would become too large
NUM_TICKS = 4
NOTHING = Markup("")
_INTERVAL = re.compile(r"\[[^\[\]]{1,40}\]")


@dataclass(frozen=True)
class Scale:
    """Maps values to shares of a width, from 0 to 1; values outside are drawn at the edge.

    Attributes:
        low, high: values at the two ends.
        is_log: whether the scale is logarithmic, so that equal factors are equally far apart. Both ends must be positive then.
    """

    low: float
    high: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Returns the position of a value, as a share of the width."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self) -> list[float]:
        """Returns a few round values of the scale, in order."""
        if self.is_log:
            return powers_of_two(self.low, self.high)
        step = round_values(self.high - self.low)
        unit = step[1] if len(step) > 1 else 1.0
        first = math.ceil(self.low / unit - 1e-9)
        return [unit * number for number in range(first, math.floor(self.high / unit + 1e-9) + 1)]


def round_values(high: float) -> list[float]:
    """Returns about NUM_TICKS round values from 0 to at most `high`."""
    if not (math.isfinite(high) and high > 0):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(high / NUM_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * NUM_TICKS >= high * 0.999)
    return [step * number for number in range(int(high / step * 1.001) + 1)]


def powers_of_two(low: float, high: float) -> list[float]:
    """Returns powers of two between two values, at most 2 * NUM_TICKS of them."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / (2 * NUM_TICKS)))
    return [2.0**power for power in range(first, last + 1, step)]


def percent(share: float) -> str:
    """Returns a share as a coordinate: "12.3%"; "0%" for NaN, which browsers reject."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%" if math.isfinite(share) else "0%"


# Marks ----------------------------------------------------------------------------------------------------------------------


def bar(start: float, end: float, kind: str, *, top: float = 4, height: float = 14) -> Markup:
    """Returns a bar between two shares of the width; `top` and `height` are pixels. An empty bar is still visible."""
    low, high = sorted((start, end))
    width = percent(max(high - low, 0.002))
    return Markup('<rect class="{}" x="{}" width="{}" y="{:g}" height="{:g}"/>').format(kind, percent(low), width, top, height)


def interval(low: float, high: float) -> Markup:
    """Returns an interval as a line with ends, between two shares of the width."""
    middle = TRACK_PX / 2
    ends = [line(x, x, "ci", middle - 5, middle + 5) for x in (low, high)]
    return line(low, high, "ci", middle, middle) + NOTHING.join(ends)


def line(start: float, end: float, kind: str, top: float, bottom: float) -> Markup:
    """Returns a line from (start, top) to (end, bottom); start and end are shares of the width, top and bottom are pixels."""
    return Markup('<line class="{}" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
        kind, percent(start), percent(end), top, bottom
    )


def dot(x: float, y: float, kind: str, title: str = "") -> Markup:
    """Returns a dot; x is a share of the width, y is in pixels."""
    return Markup('<circle class="{}" cx="{}" cy="{:.1f}" r="4"').format(kind, percent(x), y) + _closed("circle", title)


def mark(x: float, y: float, path: str, kind: str, title: str = "") -> Markup:
    """Returns a small path around a point, such as the cross of a failure."""
    inner = Markup('<path class="{}" d="{}"').format(kind, path) + _closed("path", title)
    return Markup('<svg class="mark" x="{}" y="{:.1f}">{}</svg>').format(percent(x), y, inner)


CROSS, DIAMOND, PLUS, SQUARE = "M-4-4 4 4M-4 4 4-4", "M0-5 5 0 0 5-5 0Z", "M-5 0H5M0-5V5", "M-4-4H4V4H-4Z"


def box(start: float, end: float, kind: str, top: float, height: float, *, title: str = "", label: str = "") -> Markup:
    """Returns a rectangle with a label, which is clipped at the rectangle's edge."""
    inner = Markup('<rect class="{}" width="100%" height="100%"/>').format(kind)
    if label:
        inner += Markup('<text x="3" y="{:g}">{}</text>').format(height / 2 + 4, label)
    if title:
        inner = Markup("<title>{}</title>{}").format(title, inner)
    width = percent(max(end - start, 0.001))
    return Markup('<svg x="{}" width="{}" y="{:g}" height="{:g}">{}</svg>').format(percent(start), width, top, height, inner)


def text(x: float, y: float, words: str, kind: str = "") -> Markup:
    """Returns a text; x is a share of the width. A text near an edge is aligned with it."""
    anchor = "start" if x < NEAR_EDGE_FRAC else "end" if x > 1 - NEAR_EDGE_FRAC else "middle"
    return Markup('<text class="{} {}" x="{}" y="{:.1f}">{}</text>').format(anchor, kind, percent(x), y, words)


def _closed(name: str, title: str) -> Markup:
    return Markup("><title>{}</title></{}>").format(title, Markup(name)) if title else Markup("/>")


# Charts ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a bar chart.

    Attributes:
        label: text at the left.
        value: number at the right.
        marks: drawing between label and value.
        note: a line of small text below the label.
    """

    label: str
    value: str = ""
    marks: Sequence[Markup] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A bar chart: rows of text, each with a track.

    Attributes:
        rows: the rows.
        axis: labels of the axis below the rows, as (share of the width, text); [] for no axis.
        key: (kind, meaning) of each kind of mark; [] if there is only one kind. A kind is the class of a bar ("best"),
            or a shape and its class ("dot:best").
    """

    rows: Sequence[Row]
    axis: Sequence[tuple[float, str]] = ()
    key: Sequence[tuple[str, str]] = ()

    def html(self) -> Markup:
        """Returns the chart."""
        rows = [self._row(row) for row in self.rows]
        if self.axis:
            words = NOTHING.join(text(x, 12, said) for x, said in self.axis)
            rows.append(Markup('<li class="axis"><svg aria-hidden="true">{}</svg></li>').format(words))
        return legend(self.key) + Markup('<ul class="bars">{}</ul>').format(NOTHING.join(rows))

    def _row(self, row: Row) -> Markup:
        ticks = NOTHING.join(line(x, x, "grid", 0, TRACK_PX) for x, _ in self.axis)
        note = Markup("<small>{}</small>").format(breakable(row.note)) if row.note else NOTHING
        track = Markup('<svg aria-hidden="true">{}</svg>').format(ticks + NOTHING.join(row.marks))
        return Markup("<li><span>{}{}</span>{}<b>{}</b></li>").format(row.label, note, track, tied(row.value))


def legend(key: Iterable[tuple[str, str]]) -> Markup:
    """Returns the legend: each kind of mark as drawn, with its meaning."""
    made = [Markup('<li><svg aria-hidden="true">{}</svg>{}</li>').format(_sample(kind), said) for kind, said in key]
    return Markup('<ul class="key">{}</ul>').format(NOTHING.join(made)) if made else NOTHING


def _sample(kind: str) -> Markup:
    shape, _, name = kind.rpartition(":")
    if shape == "dot":
        return dot(0.5, 7, name)
    if shape == "line":
        return line(0, 1, name, 7, 7)
    if shape:
        return mark(0.5, 7, {"cross": CROSS, "diamond": DIAMOND, "plus": PLUS, "square": SQUARE}[shape], name)
    return bar(0, 1, name, top=2, height=10)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A drawing with two axes. The labels of the vertical axis are inside the plot, on its lines.

    Attributes:
        title: text for screen readers.
        marks: drawing, from back to front.
        x: labels of the horizontal axis, as (share of the width, text).
        y: labels of the vertical axis, as (pixels from the top, text).
        key: as in Bars.
        height: pixels.
    """

    title: str
    marks: Sequence[Markup]
    x: Sequence[tuple[float, str]] = ()
    y: Sequence[tuple[float, str]] = ()
    key: Sequence[tuple[str, str]] = field(default_factory=list)
    height: float = PLOT_PX

    def html(self) -> Markup:
        """Returns the chart."""
        grid = [line(0, 1, "grid", at, at) for at, _ in self.y]
        labels = [text(0, at - 4, said, "over") for at, said in self.y]
        below = [text(at, self.height - 6, said) for at, said in self.x]
        inner = NOTHING.join([*grid, *self.marks, *labels, *below])
        drawn = Markup('<svg class="plot" role="img" aria-label="{}" height="{:g}">{}</svg>')
        return legend(self.key) + drawn.format(self.title, self.height, inner)


def heights(high: float) -> Scale:
    """Returns the scale of a plot's vertical axis, from 0 to a little above `high`; see `at_height`."""
    return Scale(0.0, 1.05 * high or 1.0)


def at_height(share: float) -> float:
    """Returns the vertical position, in pixels, of a share of a plot's vertical axis."""
    return TOP_PX + (1 - share) * (PLOT_PX - TOP_PX - BOTTOM_PX)


def tied(words: str) -> str:
    """Returns a text with no line breaks inside an interval or before a percent sign."""
    return _INTERVAL.sub(lambda found: found[0].replace(" ", "\u00a0"), words).replace(" %", "\u00a0%")


def breakable(words: str) -> Markup:
    """Returns a text in which paths may break after a slash."""
    return Markup("/<wbr>").join(escape(part) for part in tied(words).split("/"))


def inline_code(words: str) -> Markup:
    """Returns a text in which parts in backticks are formatted as code."""
    parts = tied(words).split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner
        return escape(words)
    shown = [Markup("<code>{}</code>").format(part) if number % 2 else escape(part) for number, part in enumerate(parts)]
    return NOTHING.join(shown)
