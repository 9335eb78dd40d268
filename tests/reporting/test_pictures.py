"""The pictures of README and docs/report.md show what the code of today draws. Where one fails,
`make pictures` draws them again."""

from __future__ import annotations

from tests.reporting.recorded import recorded_run
from tests.reporting.screenshots import DIGEST, WATCH, report_digest, watch_svg


def test_the_picture_of_watch_is_what_watch_shows() -> None:
    with recorded_run() as run:
        assert watch_svg(run) == WATCH.read_text(), "make pictures"


def test_the_pictures_of_the_report_are_of_todays_page() -> None:
    with recorded_run() as run:
        assert report_digest(run) == DIGEST.read_text().strip(), "make pictures"
