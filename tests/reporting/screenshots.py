"""Draws the pictures of README and docs/report.md from a recorded run: its report, light and dark,
and `overland watch` in a terminal.

python -m tests.reporting.screenshots    (or: make pictures)
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from overland.apps.report.page import asset, build_page, sections_of
from overland.apps.report.summary import RunReport, open_runs
from overland.apps.watch.status import Watch
from overland.apps.watch.view import draw
from tests.cli.processes import ROOT
from tests.reporting.browser import Browser, need_browser
from tests.reporting.recorded import recorded_run

IMAGES = ROOT / "docs" / "images"
WATCH = IMAGES / "watch.svg"
DIGEST = IMAGES / "report.digest"
WIDTH = 1080
COLUMNS = 96
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono'"
HOVERED = """(() => {
  const plot = document.querySelector('figure[data-chart=loss] .plot > svg');
  const box = plot.getBoundingClientRect();
  return [box.x + 0.44 * box.width, box.y + 0.4 * box.height];
})()"""
LOSS_ENDS = "document.querySelector('figure[data-chart=loss]').getBoundingClientRect().bottom + 20"
STORY = """(() => {
  const story = document.getElementById('run-0-story').getBoundingClientRect();
  const time = document.getElementById('run-0-mixture').getBoundingClientRect();
  return [story.top + scrollY - 24, time.bottom - story.top + 24];
})()"""
LEFT_OUT = ("foot", "run-0-config", "run-0-resume")  # of the digest: no picture shows them


def main() -> None:
    with recorded_run() as run, Browser(need_browser(), WIDTH, 1900) as browser:
        WATCH.write_text(watch_svg(run))
        page = run.parent.absolute() / "report.html"
        page.write_text(build_page([report_of(run)]))
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            browser.open(f"file://{page}")
            x, y = browser.evaluate(HOVERED)
            browser.move(x - 9, y)
            browser.move(x, y)
            browser.wait_for("!document.querySelector('figure[data-chart=loss] .tip').hidden")
            height = browser.evaluate(LOSS_ENDS)
            browser.screenshot(IMAGES / f"report-{scheme}.png", (0, 0, WIDTH, height))
        top, height = browser.evaluate(STORY)
        browser.screenshot(IMAGES / "report-story.png", (0, top, WIDTH, height))
        DIGEST.write_text(f"{report_digest(run)}\n")


def watch_svg(run: Path) -> str:
    """`overland watch` as it looks in a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(draw(Watch(run).look(), COLUMNS))
    drawn = console.export_svg(
        title=f"overland watch {run}", theme=DIMMED_MONOKAI, unique_id="watch"
    )
    # Rich asks a server for a font of its own; every reader has one.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace("Fira Code", FONTS)


def report_of(run: Path) -> RunReport:
    (reader,) = open_runs([run])
    reader.read_on()
    return reader.report()


def report_digest(run: Path) -> str:
    """Of what the pictures of the report show: with another digest they are out of date."""
    sections = sections_of([report_of(run)])
    shown = [html for name, html in sections.items() if name not in LEFT_OUT]
    words = "\n".join([*shown, asset("page.css"), asset("page.js")])
    return hashlib.sha256(words.encode()).hexdigest()


if __name__ == "__main__":
    main()
