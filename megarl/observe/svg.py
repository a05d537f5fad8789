"""Charts as inline SVG: titled, labelled, readable without colour (line names stand in a legend, values in tooltips)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 40
_DOTS_UP_TO = 120  # beyond so many points dots hide the line


@dataclass(frozen=True)
class Series:
    """One line: a name, and a value or None for each x."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]

    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]


@dataclass(frozen=True)
class _Axes:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / ((self.y_high - self.y_low) or 1.0) * (HEIGHT - TOP - BOTTOM)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def line_chart(title: str, series: Sequence[Series], *, y_label: str) -> str:
    """A figure with one line per series over the PPO step; says so when there is nothing to draw."""
    drawn = [one for one in series if one.points()]
    if not drawn:
        return _figure(title, '<p class="empty">no data</p>', "")
    xs = [x for one in drawn for x, _ in one.points()]
    ys = [y for one in drawn for _, y in one.points()]
    ticks = nice_ticks(min(ys), max(ys))
    axes = _Axes(min(xs), max(xs), ticks[0], ticks[-1])
    parts = [_frame(axes, ticks, y_label)]
    for index, one in enumerate(drawn):
        parts.append(_line(one, axes, index))
    described = "; ".join(f"{one.name} from {_text(one.points()[0][1])} to {_text(one.points()[-1][1])}" for one in drawn)
    legend = _legend([one.name for one in drawn]) if len(drawn) > 1 else ""
    return _figure(title, _svg(f"{title} by step: {described}", "".join(parts)), legend)


def stacked_chart(title: str, x: Sequence[float], layers: Sequence[Series], *, y_label: str) -> str:
    """Layers on top of each other, as shares from 0 to 1; a value of None counts as 0."""
    if not x or not layers:
        return _figure(title, '<p class="empty">no data</p>', "")
    floor = [0.0] * len(x)
    axes = _Axes(min(x), max(x), 0.0, 1.0)
    parts = [_frame(axes, [0.0, 0.25, 0.5, 0.75, 1.0], y_label)]
    for index, layer in enumerate(layers):
        roof = [low + (value or 0.0) for low, value in zip(floor, layer.y, strict=True)]
        corners = [*zip(x, roof, strict=True), *reversed(list(zip(x, floor, strict=True)))]
        points = " ".join(f"{axes.x(a):.1f},{axes.y(min(b, 1.0)):.1f}" for a, b in corners)
        mean = sum(value or 0.0 for value in layer.y) / len(x)
        parts.append(f'<polygon class="c{index}" points="{points}"><title>{escape(layer.name)}: {mean:.1%} on average</title></polygon>')
        floor = roof
    described = "; ".join(f"{layer.name} {sum(v or 0.0 for v in layer.y) / len(x):.0%}" for layer in layers)
    legend = _legend([layer.name for layer in layers])
    return _figure(title, _svg(f"{title}, mean shares: {described}", "".join(parts)), legend)


def _line(series: Series, axes: _Axes, index: int) -> str:
    points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in series.points())
    line = f'<polyline class="line c{index}" points="{points}"/>'
    if len(series.points()) > _DOTS_UP_TO:
        return line
    dots = "".join(
        f'<circle class="dot c{index}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.5">'
        f"<title>step {x:g}: {escape(series.name)} {_text(y)}</title></circle>"
        for x, y in series.points()
    )
    return line + dots


def _frame(axes: _Axes, y_ticks: Sequence[float], y_label: str) -> str:
    """Grid lines, ticks and axis labels."""
    parts = []
    for tick in y_ticks:
        y = axes.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(tick)}</text>')
    for tick in nice_ticks(axes.x_low, axes.x_high, 7):
        if axes.x_low <= tick <= axes.x_high and tick == int(tick):
            parts.append(f'<text x="{axes.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">PPO step</text>')
    parts.append(f'<text transform="rotate(-90)" x="{-middle:.1f}" y="12" text-anchor="middle">{escape(y_label)}</text>')
    return "".join(parts)


def _svg(description: str, body: str) -> str:
    label = escape(description, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" preserveAspectRatio="xMidYMid meet">{body}</svg>'


def _figure(title: str, body: str, legend: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{body}{legend}</figure>"


def _legend(names: Sequence[str]) -> str:
    items = "".join(f'<li><span class="swatch c{i}"></span>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def _text(value: float) -> str:
    """A number of at most four digits that matter."""
    return f"{value:.1e}" if value != 0 and not 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"
