"""A curve of braille dots, two across and four up in each character."""

from __future__ import annotations

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]

DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # by column, from the bottom up
MARK = "◆"


def curve(points: Points, marks: Points, width: int, height: int) -> list[str]:
    """Rows from the top, with their values on the left and the first and last x below. `marks` are
    single points of another series. Empty if there is nothing to draw."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    marks = [(x, y) for x, y in marks if math.isfinite(y)]
    if not points:
        return []
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1)
    marks = [(x, y) for x, y in marks if left <= x <= right]
    label_width = 8
    columns = max(2, width - label_width - 1)
    heights = _columns(points, left, right, 2 * columns)
    low = min([*heights, *(y for _, y in marks)])
    high = max([*heights, *(y for _, y in marks)])
    span = (high - low) or 1.0
    rows = [[0x2800] * columns for _ in range(height)]
    before = None
    for dot_column, y in enumerate(heights):
        up = round((y - low) / span * (4 * height - 1))
        first, last = sorted((up, before if before is not None else up))
        for dot in range(first, last + 1):  # so that a steep part does not fall apart
            row = rows[height - 1 - dot // 4]
            row[dot_column // 2] |= DOTS[dot_column % 2][dot % 4]
        before = up
    drawn = [[chr(cell) for cell in row] for row in rows]
    for x, value in marks:
        column = round((x - left) / (right - left) * (columns - 1))
        drawn[height - 1 - int((value - low) / span * (height - 0.01))][column] = MARK
    values = [high - span * row / max(1, height - 1) for row in range(height)]
    shown = [
        f"{value:>{label_width}.4g}" if row % 3 == 0 or row == height - 1 else " " * label_width
        for row, value in enumerate(values)
    ]
    below = f"{points[0][0]:,.0f}"
    below += f"{points[-1][0]:,.0f}".rjust(columns - len(below))
    return [
        *(f"{label} {''.join(row)}" for label, row in zip(shown, drawn, strict=True)),
        " " * (label_width + 1) + below,
    ]


def _columns(points: Points, left: float, right: float, num: int) -> list[float]:
    """The mean in each column of dots; between columns without points, a straight line."""
    sums, counts = [0.0] * num, [0] * num
    for x, y in points:
        column = min(num - 1, int((x - left) / (right - left) * num))
        sums[column] += y
        counts[column] += 1
    known = [(i, sums[i] / counts[i]) for i in range(num) if counts[i]]
    means = []
    for (i, y), (j, z) in zip(known, [*known[1:], (num, known[-1][1])], strict=True):
        means += [y + (z - y) * k / (j - i) for k in range(j - i)]
    return means
