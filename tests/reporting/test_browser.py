"""The page of a real run, in a real browser: what it shows is what was logged."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overland.apps.proofs.data import prove_data
from overland.apps.report.page import build_page, sections_of
from overland.apps.report.serve import open_server
from overland.apps.report.summary import open_runs
from tests.cli.processes import losses, overland, read_metrics
from tests.reporting.browser import Browser, need_browser
from tests.reporting.real_run import make_real_run
from tests.reporting.runs import NOW, line, make_run
from tests.reporting.test_report import HOSTILE, reports

LOSS = "figure[data-chart=loss]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(need_browser()) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_real_run(tmp_path_factory.mktemp("real"))


@pytest.fixture
def page(run: Path, browser: Browser) -> Browser:
    if not (run / "report.html").exists():
        overland("report", str(run), cwd=run.parent)
    browser.open(f"file://{run}/report.html")
    return browser


def box_of(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    found = browser.evaluate(
        f"(() => {{ const one = document.querySelector('{selector}');"
        "one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect();"
        "return [box.x, box.y, box.width, box.height]; })()"
    )
    return tuple(found)  # type: ignore[return-value]


def hover(browser: Browser, chart: str, share: float) -> dict[str, Any]:
    """What the page shows with the mouse at this share of a chart's width."""
    x, y, width, height = box_of(browser, f'figure[data-chart="{chart}"] .plot > svg')
    browser.move(x + share * width, y + height / 2)
    shown: dict[str, Any] = browser.evaluate(
        f"(() => {{ const tip = document.querySelector('figure[data-chart=\"{chart}\"] .tip');"
        "return {head: tip.querySelector('b').innerText, hidden: tip.hidden, values:"
        "Object.fromEntries([...tip.querySelectorAll('div')].map((one) =>"
        "[one.dataset.line, Number(one.dataset.value)]))}; })()"
    )
    return shown


def lines_drawn(browser: Browser) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll('{LOSS} path.line')].map((one) => one.dataset.line)"
    )
    return found


def test_what_is_shown_under_the_mouse_is_what_was_logged(page: Browser, run: Path) -> None:
    logged = losses(run / "metrics.jsonl")
    starts = [json.loads(one) for one in (run / "sessions.jsonl").read_text().splitlines()]
    starts = [one for one in starts if one["event"] == "start"]
    assert [one["step"] for one in starts] == [0, 20, 40]
    seen = set()
    for share in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.98):
        shown = hover(page, "loss", share)
        words = shown["head"].split()
        step, session = int(words[1].replace(",", "")), int(words[-1])
        assert not shown["hidden"]
        assert shown["values"]["each step logged"] == float(f"{logged[step]:.6g}")
        assert session == sum(one["step"] < step for one in starts)
        seen.add(step)
    assert len(seen) == 7
    held_out = {
        one["step"]: one for one in read_metrics(run / "metrics.jsonl") if "validation_loss" in one
    }
    shown = hover(page, "held_out.validation_loss", 0.97)
    last = held_out[60]
    assert shown["values"] == {
        "mean (selects the best checkpoint)": float(f"{last['validation_loss']:.6g}"),
        "code": float(f"{last['validation_loss/code']:.6g}"),
        "prose": float(f"{last['validation_loss/prose']:.6g}"),
    }
    assert page.said == []


def test_lost_steps_are_shown_as_lost_with_their_session(page: Browser, run: Path) -> None:
    undone = [one for one in read_metrics(run / "metrics.undone.jsonl") if "loss" in one]
    assert len(undone) >= 10
    drawn: list[dict[str, Any]] = page.evaluate(
        "JSON.parse(document.getElementById('data').textContent).charts[0].lines"
        ".filter((one) => one.kind === 'lost')"
    )
    assert [one["session"] for one in drawn] == [1, 2]
    values = [value for one in drawn for value in one["values"]]
    assert values == [float(f"{one['loss']:.6g}") for one in undone]
    cells = page.evaluate("[...document.querySelectorAll('#run-0-story table:first-of-type tr')]"
                          ".map((row) => [...row.cells].map((one) => one.innerText))")  # fmt: skip
    assert [row[-1].split(":")[0] for row in cells[1:4]] == ["killed", "killed", "finished"]
    lost = [one["step"] - 20 * (1 + number) for number, one in enumerate((undone[0], undone[-1]))]
    assert min(lost) >= 1
    assert [row[4] for row in cells[1:4]] == [
        str(max(one["step"] for one in undone if one["step"] < 40) - 20),
        str(max(one["step"] for one in undone) - 40),
        "–",
    ]


def test_the_legend_hides_lines_and_a_drag_zooms_all_charts(page: Browser) -> None:
    before = lines_drawn(page)
    assert before[0] == "each step logged"
    page.evaluate(f"document.querySelector('{LOSS} .legend button').click()")
    assert lines_drawn(page) == before[1:]
    assert "each step logged" not in hover(page, "loss", 0.5)["values"]
    page.evaluate(f"document.querySelector('{LOSS} .legend button').click()")
    assert lines_drawn(page) == before

    whole = page.evaluate("document.querySelector('figure[data-chart=lr] path.line')"
                          ".getAttribute('d')")  # fmt: skip
    x, y, width, height = box_of(page, f"{LOSS} .plot > svg")
    page.drag((x + 0.4 * width, y + height / 2), (x + 0.6 * width, y + height / 2))
    zoomed = page.evaluate("document.querySelector('figure[data-chart=lr] path.line')"
                           ".getAttribute('d')")  # fmt: skip
    assert zoomed.count("L") < whole.count("L") / 2
    steps = [int(hover(page, "loss", share)["head"].split()[1]) for share in (0.07, 0.98)]
    assert 15 < steps[0] < steps[1] < 45
    assert page.evaluate("!document.getElementById('unzoom').hidden")
    page.evaluate("document.getElementById('unzoom').click()")
    again = page.evaluate("document.querySelector('figure[data-chart=lr] path.line')"
                          ".getAttribute('d')")  # fmt: skip
    assert again == whole


def test_the_keyboard_reads_values_too(page: Browser, run: Path) -> None:
    page.evaluate(f"document.querySelector('{LOSS} .plot > svg').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        page.press(key)
    words = page.evaluate(f"document.querySelector('{LOSS} .tip').innerText")
    assert words.startswith("step 3 · session 1")
    assert f"{losses(run / 'metrics.jsonl')[3]:.4f}"[:5] in words


def test_light_and_dark(page: Browser) -> None:
    def paper() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.prefer("light")
    light = paper()
    page.prefer("dark")
    dark = paper()
    assert light != dark
    page.evaluate("document.getElementById('theme').click()")
    assert paper() == light, "as asked, whatever the system prefers"
    page.evaluate("document.getElementById('theme').click()")
    page.prefer("light")
    assert paper() == dark
    page.evaluate("document.getElementById('theme').click()")


def test_a_phone_need_not_scroll_sideways(page: Browser) -> None:
    page.resize(360, 740, mobile=True)
    page.wait_for("document.querySelector('.plot > svg').getAttribute('viewBox') === '0 0 328 380'")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.resize(1180, 900)


def test_what_was_drawn_is_what_the_proof_counts(page: Browser, run: Path) -> None:
    proven = prove_data(run)
    rows = page.evaluate("[...document.querySelectorAll('#run-0-mixture tr')].slice(1)"
                         ".map((row) => [...row.cells].map((one) => one.innerText))")  # fmt: skip
    counts = {name: int(number.replace(",", "")) for name, number, *_ in rows}
    assert counts == {name: one.turns for name, one in proven.sources.items()}
    assert sum(counts.values()) == 60 * 4


def test_samples_over_time_are_shown_and_change_nothing(page: Browser, run: Path) -> None:
    steps = page.evaluate(
        "[...document.querySelectorAll('.sample h4')].map((one) => one.innerText)"
    )
    assert steps == [f"step {step}" for step in range(10, 61, 10)]
    said = [json.loads(one)["text"] for one in (run / "samples.jsonl").read_text().splitlines()]
    assert all(one.startswith("def ") for one in said)
    assert len(set(said)) > 1
    words = ["job.dump_folder=plain", "metrics.sample_at_validation=false"]
    overland("train", "run.toml", *words, cwd=run.parent, NGPU="1")
    assert losses(run.parent / "plain" / "metrics.jsonl") == losses(run / "metrics.jsonl")


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=5)
    (run / "samples.jsonl").write_text(json.dumps({"step": 5, "text": HOSTILE}) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(6, NOW + 1, **{HOSTILE: math.nan}))
        file.write(json.dumps({"step": 6, f"validation_loss/{HOSTILE}": 1.0}) + "\n")
    (reader,) = open_runs([run])
    reader.read_on()
    (tmp_path / "page.html").write_text(build_page([reader.report()]))
    browser.open(f"file://{tmp_path}/page.html")
    assert browser.evaluate("document.title") == "A tiny run"
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    said = browser.evaluate("document.querySelector('.sample pre').innerText")
    assert "</script><script>document.title='owned'" in said
    # What gets into the page nevertheless does not run.
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', "
                     "'<img src=x onerror=\"document.title=1\">')")  # fmt: skip
    browser.wait_for("document.images[0].complete")
    assert browser.evaluate("document.title") == "A tiny run"


def test_a_peak_that_flattens_the_rest_is_cut_off_and_marked(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    values = {step: 777.0 if step == 1234 else 2 + step % 2 for step in range(1, 3001)}
    lines = (line(step, NOW + step, loss=value) for step, value in values.items())
    (run / "metrics.jsonl").write_text("".join(lines))
    (reader,) = open_runs([run])
    reader.read_on()
    (tmp_path / "page.html").write_text(build_page([reader.report()]))
    browser.open(f"file://{tmp_path}/page.html")
    ticks = f"[...document.querySelectorAll('{LOSS} .plot text')].map((one) => one.textContent)"
    assert "600" not in browser.evaluate(ticks)
    mark = f"document.querySelector('{LOSS} path.cut title').textContent"
    assert browser.evaluate(mark) == "step 1,234: 777.00"
    browser.evaluate(f"document.querySelector('{LOSS} [data-switch=\"all peaks\"]').click()")
    assert "600" in browser.evaluate(ticks)
    assert browser.evaluate(f"document.querySelectorAll('{LOSS} path.cut').length") == 0
    assert browser.said == []


def test_peaks_of_few_validations_on_several_sets_are_cut_off(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    lines = [
        json.dumps({"step": step, "validation_loss": value, "validation_loss/a": value,
                    "validation_loss/b": value + 0.5, "time": NOW + step}) + "\n"
        for step in range(100, 2100, 100)
        for value in [500.0 if step in (500, 600) else 2 + step % 200 / 100]
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text(line(1, NOW, loss=2.0) + "".join(lines))
    (reader,) = open_runs([run])
    reader.read_on()
    (tmp_path / "page.html").write_text(build_page([reader.report()]))
    browser.open(f"file://{tmp_path}/page.html")
    place = "[data-chart='held_out.validation_loss']"
    marks = f'document.querySelectorAll("{place} path.cut").length'
    assert browser.evaluate(marks) == 6


def test_a_live_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=5)
    with open_server(open_runs([run]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            browser.open(server.address)
            tile = "document.querySelector('.tile dd').innerText"
            assert browser.evaluate(tile) == "5"
            browser.evaluate(f"document.querySelector('{LOSS} .legend button').click()")
            hidden = lines_drawn(browser)
            with (run / "metrics.jsonl").open("a") as file:
                file.write("".join(line(step, NOW + step) for step in range(6, 13)))
            browser.wait_for(f"{tile} === '12'")
            assert lines_drawn(browser) == hidden, "what was hidden stays hidden"
            shown = hover(browser, "grad_norm", 0.98)
            assert shown["head"].startswith("step 12")
            said = json.dumps({"step": 12, "text": "new words"}) + "\n"
            (run / "samples.jsonl").write_text(said)
            browser.wait_for("document.querySelector('#run-0-samples') !== null")
            order = "[...document.querySelectorAll('main > section')].map((one) => one.id)"
            assert browser.evaluate(order) == [*sections_of(reports(run))], "each in its place"
            (run / "samples.jsonl").unlink()
            browser.wait_for("document.querySelector('#run-0-samples') === null")
            assert browser.said == []
        finally:
            server.shutdown()
            thread.join()
