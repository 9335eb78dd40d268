"""Makes the pictures of docs/report.md and the README: the report of a real run, light and dark.

python -m tests.reporting.screenshots [RUN]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from overland.tools.reporting.page import build_page
from overland.tools.reporting.run import open_runs
from tests.cli.processes import ROOT
from tests.reporting.browser import Browser, need_browser
from tests.reporting.real_run import make_real_run

IMAGES = ROOT / "docs" / "images"
WIDTH = 1080
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Browser(need_browser(), WIDTH, 1900) as browser:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else make_real_run(Path(folder) / "a", 600)
        os.chdir(run.parent)
        (reader,) = open_runs([Path(run.name)])
        reader.read_on()
        page = Path(folder) / "report.html"
        page.write_text(build_page([reader.report()]))
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


if __name__ == "__main__":
    main()
