"""Builds the report page of one or more runs, a single, self-contained HTML file: its sections and
tables, in order. `charts.py` decides which charts there are, and `page.js` draws them.

Everything that comes from a run is untrusted: the template (`page.html.j2`) escapes it, or it is
JSON inside a script element that no content can close. The page's content security policy allows
only its own script and styles, identified by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import overland
from overland.apps.report.charts import Chart, Line, charts_of, charts_to_json
from overland.apps.report.sessions import PARTS, ReportedSession
from overland.apps.report.summary import RunReport, devices_in_words, moment
from overland.apps.report.svg import chart_svg, in_page, stacked_bar, timeline_svg, value_words
from overland.apps.watch.files import finite
from overland.apps.watch.status import STATES
from overland.errors import ReportError, sentence
from overland.files import replace_file
from overland.plugins import need
from overland.run_folder import CONFIG
from overland.words import command, duration, number_of, visible

TABLE_ROWS = 12  # in the table of a chart's numbers
MOST_SESSIONS = 200
MOST_HAPPENINGS = 200
MOST_SCORED = 8  # checkpoints
TOLD = ("fault", "killed", "failed", "rewind", "message", "preflight", "straggler", "stall",
        "agent")  # fmt: skip
COLORS: dict[str, str | int] = {
    "compute": 0,
    "data": 4,
    "validation": 2,
    "save": 3,
    "start": "start",
    "lost": "lost",
    "end": 6,
}
LONGEST_NAME = 60  # characters, of up to four bytes each


def build_page(runs: Sequence[RunReport], live: bool = False) -> str:
    """Returns the whole page. A live page requests new content every few seconds."""
    return html(
        "page",
        title=title_of(runs),
        live=live,
        policy=policy(live),
        version=overland.__version__,
        style=trusted(asset("page.css")),
        script=trusted(asset("page.js")),
        sections={name: trusted(part) for name, part in sections_of(runs).items()},
        data=trusted(json_in_script(data_of(runs))),
    )


@cache
def _template() -> Any:
    jinja2 = need("jinja2", "the page of a report", "cluster", ReportError)
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: value if hasattr(value, "__html__") else visible(str(value)),
    )
    return environment.from_string(asset("page.html.j2")).module


def html(macro: str, *given: object, **named: object) -> str:
    """Returns a part of the page, made by a macro of the template."""
    return str(getattr(_template(), macro)(*given, **named)).strip()


def trusted(markup: str) -> Any:
    """Returns text that the template inserts as it is."""
    return need("markupsafe", "the page of a report", "cluster", ReportError).Markup(markup)


def policy(live: bool) -> str:
    digests = {name: _digest(asset(name)) for name in ("page.css", "page.js")}
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src '{digests['page.js']}'; "
        f"style-src '{digests['page.css']}'{connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def json_in_script(value: Any) -> str:
    """Returns JSON that is safe inside a script element, even if it contains `</script>`."""
    plain = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def title_of(runs: Sequence[RunReport]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return runs[0].status.description or runs[0].name


def data_of(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Returns the data that the page's script draws."""
    return {
        "charts": charts_to_json(charts_of(runs)),
        "runs": [
            {
                "name": run.name,
                "sessions": [[session.step, session.number] for session in run.sessions],
            }
            for run in runs
        ],
    }


def sections_of(runs: Sequence[RunReport]) -> dict[str, str]:
    """Returns the sections of the page by id, in order; empty sections are omitted."""
    curves = html("curves", [_drawn(chart) for chart in charts_of(runs)])
    if len(runs) == 1:
        (run,) = runs
        status = run.status
        because = f": {status.because}" if status.because and status.state != "stopped" else ""
        found = {
            "top": html("header", run, STATES[status.state] + because),
            "figures": html("figures", run.figures),
            "facts": html("facts", "What was trained", run.facts, "h2"),
            "charts": curves,
        }
        found |= {f"run-0-{name}": part for name, part in parts_of(run, "h2").items()}
    else:
        names = [run.name for run in runs]
        found = {
            "top": html("header_of_several", runs),
            "figures": html("comparison", names, list(_compared(runs))),
            "charts": curves,
        }
        for number, run in enumerate(runs):
            about = html("facts", "What was trained", run.facts, "h3")
            parts = [trusted(part) for part in (about, *parts_of(run, "h3").values())]
            found[f"run-{number}"] = html("of_one", run, number, parts)
    found["foot"] = html("foot", moment(time.time()), overland.__version__, len(runs))
    return {name: part for name, part in found.items() if part}


def parts_of(run: RunReport, level: str) -> dict[str, str]:
    """Returns what the page says about a run below its curves, by name."""
    return {
        "story": story(run, level) if run.sessions or run.happenings else "",
        "time": where_time_went(run, level) if run.goodput.in_sessions else "",
        "mixture": mixture(run, level) if run.mixture.sources or run.mixture.note else "",
        "scores": scores(run, level) if run.scores else "",
        "samples": html("samples", run, level) if run.samples else "",
        "config": html("config", run, level),
        "environment": html("facts", "Environment", run.environment, level),
        "resume": resume(run, level),
    }


def _compared(runs: Sequence[RunReport]) -> Iterator[list[str]]:
    """Yields the key figures of several runs, with one column per run."""
    known = [{one.name: one.words for one in run.figures} for run in runs]
    yield ["state", *(STATES[run.status.state] for run in runs)]
    for name in dict.fromkeys(name for words in known for name in words):
        yield [name, *(words.get(name, "–") for words in known)]


def _drawn(chart: Chart) -> tuple[Chart, str, Any, list[str], list[list[str]]]:
    """Returns a chart with a description, its picture, and the heads and rows of its table:
    selected steps, and each line's value at or just before them."""
    about = ", ".join(word for word in (chart.unit, chart.note) if word)
    if odd := sum(len(line.odd) for line in chart.lines):
        about += f"{'; ' if about else ''}{number_of(odd, 'value')} not finite (▼)"
    picture = trusted(chart_svg(chart, in_page))
    lines = [line for line in chart.lines if len(line.steps) and line.kind != "lost"]
    if not lines:
        return chart, about, picture, [], []
    main = max(lines, key=lambda line: (line.kind != "raw", line.steps[-1]))
    places = np.unique(np.linspace(0, len(main.steps) - 1, TABLE_ROWS).astype(int))
    rows = [
        [f"{step:,.0f}", *(_value_at(line, step, chart.form) for line in lines)]
        for step in main.steps[places].tolist()
    ]
    return chart, about, picture, ["step", *(line.name for line in lines)], rows


def _value_at(line: Line, step: float, form: str) -> str:
    place = int(np.searchsorted(line.steps, step, side="right")) - 1
    if place < 0 or (step > line.steps[-1] and step - line.steps[-1] > 0.05 * step):
        return "–"
    return value_words(float(line.values[place]), form)


def story(run: RunReport, level: str) -> str:
    """Returns the sessions, and faults and messages, newest last; saves are only in the
    timeline."""
    rows = [session_row(one) for one in run.sessions[-MOST_SESSIONS:]]
    more = len(run.sessions) - len(rows)
    earlier = f"{more:,} earlier sessions are not shown." if more else ""
    found = [one for one in run.happenings if one.kind in TOLD]
    told = [
        (moment(one.time), f"{one.step or 0:,}", one.kind, one.what)
        for one in found[-MOST_HAPPENINGS:]
    ]
    count = f"{len(told):,} of {len(found):,}" if len(found) > len(told) else f"{len(found):,}"
    timeline = trusted(timeline_svg(run, in_page))
    return html("story", run, level, timeline, rows, earlier, {"count": count, "rows": told})


def session_row(session: ReportedSession) -> list[str]:
    return [
        str(session.number),
        moment(session.begun),
        duration(session.ended - session.begun),
        f"{session.step:,} – {session.last_step:,}",
        f"{session.lost_steps:,}" if session.lost_steps else "–",
        devices_in_words(session.facts) or "–",
        str(session.facts.get("job") or "–"),
        session.how + (f": {session.what}" if session.what else ""),
    ]


def where_time_went(run: RunReport, level: str) -> str:
    goodput = run.goodput
    order = [(words, goodput.parts[use], COLORS[use]) for use, words in PARTS.items()]
    rows = []
    for words, seconds, color in order:
        shown = f"{seconds:.1f} s" if seconds < 120 else duration(seconds)
        rows.append((in_page(color), words, shown, f"{seconds / goodput.in_sessions:.1%}"))
    note = f"Goodput is {goodput.share:.1%}: the share of session time spent computing steps that "
    note += "count."
    if goodput.between >= 1:
        note += f" No session was running for {duration(goodput.between)}."
    return html("where_time_went", level, note, trusted(stacked_bar(order)), rows)


def mixture(run: RunReport, level: str) -> str:
    rows = [
        (one.name, f"{one.rows:,}", f"{one.share:.2%}", f"{one.planned:.2%}")
        for one in run.mixture.sources
    ]
    return html("mixture", run.mixture, level, rows)


def scores(run: RunReport, level: str) -> str:
    """Returns a table of evaluation scores, with one column per checkpoint."""
    steps = sorted({one.step for one in run.scores})[-MOST_SCORED:]
    known = {
        (one.name, one.metric, one.step): f"{one.value:.5g}"
        + (f" ± {one.stderr:.2g}" if one.stderr else "")
        for one in run.scores
    }
    rows = [
        (name, metric, *(known.get((name, metric, step), "–") for step in steps))
        for name, metric in dict.fromkeys((one.name, one.metric) for one in run.scores)
    ]
    return html("scores", level, [f"step {step:,}" for step in steps], rows)


def resume(run: RunReport, level: str) -> str:
    words = "This command resumes from the newest checkpoint, on any number of devices:"
    words_of_command = run.resume
    if run.status.state == "finished" and run.status.steps:
        words = "The run has finished. To train for more steps:"
        longer = f"training.steps={2 * run.status.steps}"
        words_of_command = command("overland", "train", run.path / CONFIG, longer)
    return html("resume", run, level, words, words_of_command)


def write_page(runs: Sequence[RunReport], path: Path) -> Path:
    if path.is_dir():
        raise ReportError(f"--output {path} is a folder: name a file, such as {path}/report.html")
    _write(path, build_page(runs), "use --output to write another file")
    return path


def write_plots(runs: Sequence[RunReport], folder: Path) -> list[Path]:
    """Writes each plot as a standalone SVG."""
    plots = {chart.id: chart_svg(chart) for chart in charts_of(runs)}
    for run in runs:
        name = "timeline" if len(runs) == 1 else f"timeline.{run.name}"
        if drawn := timeline_svg(run):
            plots[name] = drawn
    written: list[Path] = []
    for name, drawn in plots.items():
        written.append(folder / f"{_file_name(name, {one.stem.lower() for one in written})}.svg")
        _write(written[-1], drawn, "use --svg to write to another folder")
    return written


def _file_name(name: str, taken: Collection[str]) -> str:
    """Returns a file name that is valid on any file system, with a number if it is taken."""
    stem = found = re.sub(r"[^\w.-]+", "_", name)[:LONGEST_NAME]
    for number in itertools.count(2):
        if found.lower() not in taken:
            break
        found = f"{stem}-{number}"
    return found


def _write(path: Path, content: str, way_out: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, durable=False)
    except OSError as error:
        raise ReportError(f"{sentence(error)}; {way_out}") from None


def numbers_of(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Returns everything a page shows, for programs. Non-finite numbers become null."""
    found = {
        "runs": [run.to_json() for run in runs],
        "charts": charts_to_json(charts_of(runs), differences=False),
    }
    return finite(found)
