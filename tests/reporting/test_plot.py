import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from overland.apps.report.plot import plot_losses
from overland.apps.report.svg import HEIGHT, MOST_POINTS, WIDTH, ticks

Point = tuple[int, float]
Draw = Callable[..., ElementTree.Element]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    def drawn(training: Sequence[Point] = (), **held_out: Sequence[Point]) -> ElementTree.Element:
        records = [{"step": step, "loss": loss} for step, loss in training]
        for name, points in held_out.items():
            records += [{"step": step, f"validation_loss/{name}": loss} for step, loss in points]
        records.sort(key=lambda record: record["step"])
        metrics, target = tmp_path / "metrics.jsonl", tmp_path / "loss.svg"
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        plot_losses(metrics, target, "a <title>")
        return ElementTree.fromstring(target.read_text())

    return drawn


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def polyline(svg: ElementTree.Element, number: int = 0) -> list[tuple[float, float]]:
    points = list(svg.iter(f"{SVG}polyline"))[number].attrib["points"].split()
    return [tuple(map(float, point.split(","))) for point in points]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (4.34, 7.56, [4, 5, 6, 7, 8]),
        (10, 160, [0, 25, 50, 75, 100, 125, 150, 175]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_enclose_the_data(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == expected


@pytest.mark.parametrize("value", [0.0, 1e-9, 3.0, 123456.0, -2.0])
def test_ticks_of_a_single_value_are_distinct(value: float) -> None:
    found = ticks(value, value)
    assert len(found) >= 2
    assert found[0] <= value <= found[-1]


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_ticks_are_few_at_any_scale(scale: float) -> None:
    assert 3 <= len(ticks(0.13 * scale, 0.87 * scale)) <= 9


def test_a_falling_loss_is_drawn_falling_inside_the_frame(draw: Draw) -> None:
    svg = draw([(1, 8.0), (50, 5.0), (100, 4.0)])
    points = polyline(svg)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points)  # SVG counts downwards
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in points)
    assert {"— training, last 4", "a <title>"} <= set(texts(svg))


def test_several_lines_have_their_names_and_colors(draw: Draw) -> None:
    svg = draw([(0, 1.0), (1, 2.0)], wiki=[(0, 2.0), (1, 1.0)])
    colors = [line.attrib["stroke"] for line in svg.iter(f"{SVG}polyline")]
    assert len(set(colors)) == 2
    assert {"— training, last 2", "— held out: wiki, last 1"} <= set(texts(svg))


def test_a_line_of_one_point_is_still_seen(draw: Draw) -> None:
    (dot,) = draw(wiki=[(80, 4.9)]).iter(f"{SVG}circle")
    assert 0 < float(dot.attrib["cx"]) < WIDTH


@pytest.mark.parametrize("points", [[], [(1, math.nan), (2, math.inf)]])
def test_without_a_finite_point_an_empty_chart_is_drawn(points: list[Point], draw: Draw) -> None:
    assert not list(draw(points).iter(f"{SVG}polyline"))


def test_points_that_are_not_finite_are_left_out(draw: Draw) -> None:
    assert len(polyline(draw([(1, 8.0), (2, math.nan), (3, 7.0)]))) == 2


def test_a_long_run_makes_a_small_file(draw: Draw) -> None:
    svg = draw([(i, 1 / (i + 1)) for i in range(20_000)])
    assert len(polyline(svg)) <= MOST_POINTS + 2
    assert "— training, last 5e-05" in texts(svg)
    assert not list(svg.iter(f"{SVG}circle"))


def test_losses_are_read_from_metrics_and_the_later_line_counts(tmp_path: Path) -> None:
    records = [
        {"step": 1, "loss": 9.0, "grad_norm": 1.0},
        {"step": 2, "loss": 8.0},
        {"step": 2, "validation_loss": 8.5, "validation_loss/some_text": 8.5},
        {"step": 2, "loss": 7.0},  # after a resume
    ]
    lines = [json.dumps(record) for record in records]
    metrics, target = tmp_path / "metrics.jsonl", tmp_path / "loss.svg"
    metrics.write_text("\n".join([*lines, '{"step": 3, "lo']))  # cut short by a kill
    plot_losses(metrics, target, "title")
    svg = ElementTree.fromstring(target.read_text())
    assert len(list(svg.iter(f"{SVG}polyline"))) == 2
    assert {"— training, last 7", "— held out: some_text, last 8.5"} <= set(texts(svg))
    assert not re.search("grad_norm", target.read_text())
