"""Builds the report page of one or more runs: a single, self-contained HTML file.

Everything that comes from a run is untrusted: it is escaped (`text`), or is JSON inside a script
element that no content can close. The page's content security policy allows only its own script and
styles, identified by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import overland
from overland.apps.report.charts import Chart, Line, charts_of, charts_to_json
from overland.apps.report.evaluations import CheckpointScore
from overland.apps.report.goodput import PARTS
from overland.apps.report.sessions import ReportedSession
from overland.apps.report.summary import Figure, RunReport, Setting, moment
from overland.apps.report.svg import chart_svg, in_page, stacked_bar, timeline_svg, value_words
from overland.apps.watch.watch import STATES
from overland.run_folder import CONFIG
from overland.words import command, duration, number_of, visible

TABLE_ROWS = 12  # in the table of a chart's numbers
MOST_SESSIONS = 200
MOST_HAPPENINGS = 200
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
Cells = Sequence[str]


def build_page(runs: Sequence[RunReport], live: bool = False) -> str:
    """Returns the whole page. A live page requests new content every few seconds."""
    style, script = asset("page.css"), asset("page.js")
    title = title_of(runs)
    body = "\n".join(
        f'<section id="{name}">{html}</section>' for name, html in sections_of(runs).items()
    )
    return f"""<!doctype html>
<html lang="en"{' data-live="yes"' if live else ""}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(live)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="overland {escape(overland.__version__)}">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<button id="theme" type="button" hidden>Theme: automatic</button>
<button id="unzoom" type="button" hidden>Show all steps</button>
<main id="main">
{body}
</main>
<script type="application/json" id="data">{json_in_script(data_of(runs))}</script>
<script>{script}</script>
</body>
</html>
"""


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


def text(words: object) -> str:
    """Escapes untrusted text for the page."""
    return escape(visible(str(words)))


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
    charts = charts_of(runs)
    found = {"top": header(runs)}
    if len(runs) == 1:
        (run,) = runs
        found |= {"figures": figures(run.figures), "facts": facts(run)}
        found["charts"] = chart_figures(charts)
        found |= {f"run-0-{name}": html for name, html in parts_of(run, "h2").items()}
    else:
        found |= {"figures": comparison(runs), "charts": chart_figures(charts)}
        found |= {f"run-{number}": of_one(run, number) for number, run in enumerate(runs)}
    found["foot"] = (
        f'<p class="muted">Created {moment(time.time())} by overland '
        f"{escape(overland.__version__)} from the run "
        f"folder{'s' if len(runs) > 1 else ''} alone.</p>"
    )
    return {name: html for name, html in found.items() if html}


def of_one(run: RunReport, number: int) -> str:
    """Returns the collapsed section of one run among several."""
    inner = "".join([facts(run, "h3"), *parts_of(run, "h3").values()])
    return (
        f'<details data-key="run-{number}"><summary><h2>{text(run.name)}</h2></summary>{inner}'
        "</details>"
    )


def parts_of(run: RunReport, level: str) -> dict[str, str]:
    return {
        "story": story(run, level),
        "time": where_time_went(run, level),
        "mixture": mixture(run, level),
        "scores": scores(run, level),
        "samples": samples(run, level),
        "config": config(run, level),
        "environment": environment(run, level),
        "resume": resume(run, level),
    }


# The top


def header(runs: Sequence[RunReport]) -> str:
    if len(runs) > 1:
        names = ", ".join(text(run.path) for run in runs)
        return f"<h1>{len(runs)} runs side by side</h1><p class='muted mono'>{names}</p>"
    (run,) = runs
    status = run.status
    because = f": {status.because}" if status.because and status.state != "stopped" else ""
    return (
        f"<h1>{text(status.description or run.name)}</h1>"
        f'<p><span class="state {escape(status.state)}">{text(STATES[status.state] + because)}'
        f'</span> <span class="muted mono">{text(run.path)}</span></p>'
    )


def figures(found: Sequence[Figure]) -> str:
    tiles = "".join(
        f'<div class="tile"><dt>{text(one.name)}</dt><dd>{text(one.words)}</dd>'
        f'<dd class="note">{text(one.note)}</dd></div>'
        for one in found
    )
    return f'<h2 class="quiet">Key figures</h2><dl class="tiles">{tiles}</dl>'


def comparison(runs: Sequence[RunReport]) -> str:
    """Returns a table of the key figures of several runs, with one column per run."""
    names = list(dict.fromkeys(one.name for run in runs for one in run.figures))
    known = [{one.name: one for one in run.figures} for run in runs]
    states = [["state", *(STATES[run.status.state] for run in runs)]]
    rows = [[name, *(by[name].words if name in by else "–" for by in known)] for name in names]
    return "<h2>Key figures</h2>" + table(["", *(run.name for run in runs)], [*states, *rows], 1)


def facts(run: RunReport, level: str = "h2") -> str:
    rows = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(words)}</dd></div>" for name, words in run.facts
    )
    return f'<{level}>What was trained</{level}><dl class="facts">{rows}</dl>' if rows else ""


# Charts


def chart_figures(charts: Sequence[Chart]) -> str:
    if not charts:
        return '<h2>Curves</h2><p class="muted">No steps have been logged yet.</p>'
    return '<h2>Curves</h2><div class="charts">' + "".join(map(chart_figure, charts)) + "</div>"


def chart_figure(chart: Chart) -> str:
    about = ", ".join(word for word in (chart.unit, chart.note) if word)
    odd = sum(len(line.odd) for line in chart.lines)
    if odd:
        about += f"{'; ' if about else ''}{number_of(odd, 'value')} not finite (▼)"
    wide = ' class="chart wide"' if chart.id == "loss" else ' class="chart"'
    return (
        f'<figure{wide} data-chart="{text(chart.id)}"><figcaption><h3>{text(chart.title)}</h3>'
        f'<span class="muted">{text(about)}</span></figcaption><div class="plot"><noscript>'
        f"{chart_svg(chart, in_page)}</noscript></div>"
        f'<details data-key="{text(chart.id)}"><summary>Numbers</summary>{numbers(chart)}</details>'
        "</figure>"
    )


def numbers(chart: Chart) -> str:
    """Returns a chart as a table: selected steps, and each line's value at or just before them."""
    lines = [line for line in chart.lines if len(line.steps) and line.kind != "lost"]
    if not lines:
        return '<p class="muted">There are no finite values.</p>'
    main = max(lines, key=lambda line: (line.kind != "raw", line.steps[-1]))
    places = np.unique(np.linspace(0, len(main.steps) - 1, TABLE_ROWS).astype(int))
    rows = []
    for step in main.steps[places].tolist():
        cells = (_value_at(line, step, chart.form) for line in lines)
        rows.append([f"{step:,.0f}", *cells])
    return table(["step", *(line.name for line in lines)], rows)


def _value_at(line: Line, step: float, form: str) -> str:
    place = int(np.searchsorted(line.steps, step, side="right")) - 1
    if place < 0 or (step > line.steps[-1] and step - line.steps[-1] > 0.05 * step):
        return "–"
    return value_words(float(line.values[place]), form)


# History
def story(run: RunReport, level: str) -> str:
    if not run.sessions:
        return ""
    shown = run.sessions[-MOST_SESSIONS:]
    rows = [session_row(one) for one in shown]
    head = ["session", "started", "duration", "steps", "lost", "devices", "job", "how it ended"]
    more = len(run.sessions) - len(shown)
    note = "" if run.are_recorded else (
        '<p class="muted">The version that trained this run did not record its sessions: they are '
        "inferred from its attempts, or from gaps in the log.</p>"
    )  # fmt: skip
    note += f'<p class="muted">{more:,} earlier sessions are not shown.</p>' if more else ""
    drawn = f'<div class="scroll">{timeline_svg(run, in_page)}</div>'
    return (
        f"<{level}>History</{level}>{note}{drawn}{table(head, rows, words=(7,))}{happenings(run)}"
    )


def session_row(session: ReportedSession) -> list[str]:
    facts = session.facts
    devices = facts.get("devices")
    nodes = facts.get("nodes")
    where = f"{devices:,}" if isinstance(devices, int) else "–"
    if isinstance(nodes, list):
        where = ", ".join(map(str, nodes[:4]))
    elif isinstance(nodes, int) and nodes > 1:
        where += f" on {nodes:,} nodes"
    return [
        str(session.number),
        moment(session.begun),
        duration(session.ended - session.begun),
        f"{session.step:,} – {session.last_step:,}",
        f"{session.lost_steps:,}" if session.lost_steps else "–",
        where,
        str(facts.get("job") or "–"),
        session.how + (f": {session.what}" if session.what else ""),
    ]


def happenings(run: RunReport) -> str:
    """Returns the table of faults and messages, newest last; saves only appear in the timeline."""
    found = [one for one in run.happenings if one.kind in TOLD]
    shown = found[-MOST_HAPPENINGS:]
    if not shown:
        return ""
    rows = [[moment(one.time), f"{one.step or 0:,}", one.kind, one.what] for one in shown]
    count = f"{len(shown):,} of {len(found):,}" if len(found) > len(shown) else f"{len(found):,}"
    return (
        f'<details data-key="{text(run.name)}-happenings"><summary>What happened ({count})'
        f"</summary>{table(['time', 'step', 'kind', 'what'], rows, words=(2, 3))}</details>"
    )


def where_time_went(run: RunReport, level: str) -> str:
    goodput = run.goodput
    if not goodput.in_sessions:
        return ""
    order = [(use, words, goodput.parts[use]) for use, words in PARTS.items()]
    drawn = stacked_bar([(words, value, COLORS[use]) for use, words, value in order])
    rows = []
    for use, words, seconds in order:
        share = seconds / goodput.in_sessions
        rows.append([f"\0{use}", words, exact_duration(seconds), f"{share:.1%}"])
    note = "" if goodput.is_split else (
        "The version that trained this run did not record how its time was used: all session time "
        "is counted as computing. "
    )  # fmt: skip
    note += f"Goodput is {goodput.share:.1%}: " if goodput.share is not None else ""
    note += "the share of session time spent computing steps that count."
    if goodput.between >= 1:
        note += f" No session was running for {duration(goodput.between)}."
    return (
        f'<{level}>Where the time went</{level}><p class="muted">{text(note)}</p>{drawn}'
        f"{table(['', 'part', 'time', 'share'], rows, words=(1,))}"
    )


def exact_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else duration(seconds)


def mixture(run: RunReport, level: str) -> str:
    found = run.mixture
    title = f"<{level}>Data mixture</{level}>"
    if not found.sources:
        return f'{title}<p class="muted">{text(found.note)}</p>' if found.note else ""
    rows = [
        [one.name, f"{one.rows:,}", f"{one.share:.2%}", f"{one.planned:.2%}"]
        for one in found.sources
    ]
    note = found.note or "Counted from the ledger of consumed batches, not from the config."
    heads = ["source", "rows", "share", "planned"]
    return f'{title}<p class="muted">{text(note)}</p>{table(heads, rows, words=(0,))}'


def scores(run: RunReport, level: str) -> str:
    """Returns a table of evaluation scores, with one column per checkpoint."""
    if not run.scores:
        return ""
    steps = sorted({one.step for one in run.scores})[-8:]
    known = {(one.name, one.metric, one.step): score_words(one) for one in run.scores}
    kinds = list(dict.fromkeys((one.name, one.metric) for one in run.scores))
    rows = []
    for name, metric in kinds:
        rows.append([name, metric, *(known.get((name, metric, step), "–") for step in steps)])
    heads = ["evaluation", "metric", *(f"step {step:,}" for step in steps)]
    return f"<{level}>Evaluations</{level}>{table(heads, rows, words=(0, 1))}"


def score_words(score: CheckpointScore) -> str:
    return f"{score.value:.5g}" + (f" ± {score.stderr:.2g}" if score.stderr else "")


def samples(run: RunReport, level: str) -> str:
    if not run.samples:
        return ""
    prompt = f'<p class="muted">Completions of {text(repr(run.prompt))}</p>'
    said = "".join(
        f'<div class="sample"><h4>step {step:,}</h4><pre>{text(words)}</pre></div>'
        for step, words in run.samples
    )
    return f"<{level}>Samples</{level}>{prompt if run.prompt else ''}{said}"


def config(run: RunReport, level: str) -> str:
    if not run.settings:
        return f'<{level}>Config</{level}><p class="muted">Unknown: {CONFIG} cannot be read.</p>'
    changed = [one for one in run.settings if one.differs]
    rest = [one for one in run.settings if not one.differs]
    return (
        f"<{level}>Config</{level}>"
        f'<p class="muted">{len(changed):,} keys differ from their defaults.</p>'
        f"{_settings(changed, with_default=True)}"
        f'<details data-key="{text(run.name)}-config"><summary>The other {len(rest):,} keys, with '
        f"their default values</summary>{_settings(rest, with_default=False)}</details>"
    )


def _settings(found: Iterable[Setting], with_default: bool) -> str:
    """Returns a table of settings; a key's description is shown on hover."""
    rows = "".join(
        f'<tr><td title="{text(one.description)}">{text(one.key)}</td><td>{text(one.value)}</td>'
        + (f'<td class="muted">{text(one.default)}</td>' if with_default else "")
        + "</tr>"
        for one in found
    )
    last = "<th>default</th>" if with_default else ""
    head = f"<tr><th>key</th><th>value</th>{last}</tr>"
    return f'<div class="scroll"><table class="mono left">{head}{rows}</table></div>'


def environment(run: RunReport, level: str) -> str:
    if not run.environment:
        return ""
    rows = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(words)}</dd></div>" for name, words in run.environment
    )
    return f'<{level}>Environment</{level}><dl class="facts">{rows}</dl>'


def resume(run: RunReport, level: str) -> str:
    longer = ""
    if run.status.state == "finished" and run.status.steps:
        longer = command("overland", "train", run.path / CONFIG,
                         f"training.steps={2 * run.status.steps}")  # fmt: skip
    words = "The run has finished. To train for more steps:" if longer else (
        "This command resumes from the newest checkpoint, on any number of devices:"
    )  # fmt: skip
    submitted = ""
    if run.was_submitted:
        submitted = '<p class="muted">This run was submitted as jobs; <code>overland submit</code> '
        submitted += "with the same config continues the chain.</p>"
    newest = run.status.checkpoints.newest
    saved = f'<p class="muted">The newest checkpoint is {text(newest)}.</p>' if newest else ""
    return (
        f'<{level}>How to resume</{level}><p class="muted">{words}</p>'
        f"<pre>{text(longer or run.resume)}</pre>{saved}{submitted}"
    )


def table(
    heads: Cells, rows: Sequence[Cells], head_columns: int = 0, words: Sequence[int] = ()
) -> str:
    """Returns an HTML table. Columns of numbers are right-aligned, those in `words` left-aligned. A
    cell "\\0USE" becomes a patch in the color of that use of time."""

    def cell(number: int, content: str, tag: str = "td") -> str:
        is_left = number in words or (head_columns and number < head_columns)
        side = ' class="left"' if is_left else ""
        if content.startswith("\0") and tag == "td":
            patch = f'<rect width="12" height="12" rx="3" fill="{in_page(COLORS[content[1:]])}"/>'
            return (
                f'<td><svg class="patch" viewBox="0 0 12 12" aria-hidden="true">{patch}</svg></td>'
            )
        return f"<{tag}{side}>{text(content)}</{tag}>"

    head = "".join(cell(number, one, "th") for number, one in enumerate(heads))
    body = "".join(
        f"<tr>{''.join(cell(number, one) for number, one in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
