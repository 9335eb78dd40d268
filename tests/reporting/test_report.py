"""What a report says about runs in any state."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from overland.apps.report.charts import MOST_POINTS, charts_of
from overland.apps.report.lines import Lines, bin_sizes, means, thinned
from overland.apps.report.page import build_page, json_in_script, numbers_of, write_plots
from overland.apps.report.summary import RunReport, open_runs
from overland.cli.main import app
from tests.reporting.runs import (
    ATTEMPT,
    FAULT,
    NOW,
    SESSION,
    add_events,
    line,
    make_run,
)

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u2028\0"


def reports(*runs: Path) -> list[RunReport]:
    readers = open_runs(list(runs))
    for reader in readers:
        reader.read_on()
    return [reader.report() for reader in readers]


def line_of(report: RunReport, chart: str, name: str = "") -> dict[float, float]:
    (found,) = [one for one in charts_of([report]) if one.id == chart]
    (drawn,) = [one for one in found.lines if name in one.name]
    return dict(zip(drawn.steps.tolist(), drawn.values.tolist(), strict=True))


def figure(report: RunReport, name: str) -> float | None:
    return next((one.value for one in report.figures if one.name == name), None)


def session(step: int, begun: float, started: float, **more: Any) -> dict[str, Any]:
    return {"time": started, "event": "start", "step": step, "begun": begun, "devices": 8, **more}


def write_sessions(run: Path, *lines: dict[str, Any]) -> None:
    (run / "sessions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


# Runs in whatever state


def test_a_run_without_any_step_has_a_page(tmp_path: Path) -> None:
    (report,) = reports(make_run(tmp_path))
    page = build_page([report])
    assert "No steps have been logged yet" in page
    assert "A tiny run" in page
    assert charts_of([report]) == []


def test_a_torn_last_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(4, NOW)[:40])
    (reader,) = open_runs([run])
    reader.read_on()
    assert reader.lines.logged.last_step == 3
    assert "3</dd>" in build_page([reader.report()])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(4, NOW)[40:])
    reader.read_on()
    assert reader.lines.logged.last_step == 4


def test_a_run_that_crashed_says_where_and_why(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=20)
    write_sessions(
        run,
        session(0, NOW - 60, NOW - 50),
        {"time": NOW + 1, "event": "end", "step": 20, "how": "failed", "what": "no <b>memory</b>"},
    )
    (report,) = reports(run)
    assert [one.how for one in report.sessions] == ["failed"]
    page = build_page([report])
    assert "failed: no &lt;b&gt;memory&lt;/b&gt;" in page


def test_losses_that_are_not_finite_are_marked_and_the_rest_is_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    odd = {3: math.nan, 4: math.inf, 5: -math.inf}
    lines = [line(step, NOW + step, loss=odd.get(step, 1.0 / step)) for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(lines))
    (report,) = reports(run)
    assert list(line_of(report, "loss", "each step")) == [1, 2, 6, 7, 8]
    (chart,) = [one for one in charts_of([report]) if one.id == "loss"]
    assert chart.lines[0].odd == [(3, "NaN"), (4, "infinite"), (5, "infinite")]
    assert "3 values not finite" in build_page([report])
    json.loads(json.dumps(numbers_of([report]), allow_nan=False))


def test_a_run_whose_losses_are_all_nan_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "metrics.jsonl").write_text("".join(line(i, NOW + i, loss=math.nan) for i in range(5)))
    assert "5 values not finite" in build_page(reports(run))


def test_the_figure_of_a_loss_that_became_nan_is_not_an_older_mean(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    odd = {7: math.nan, 40: math.inf, **dict.fromkeys(range(91, 101), math.nan)}
    lines = [line(step, NOW + step, loss=odd.get(step, 3.0)) for step in range(1, 101)]
    lines += [json.dumps({"step": step, "validation_loss": loss}) + "\n"
              for step, loss in ((100, 4.0), (101, math.nan))]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(lines))
    figures = {one.name: (one.words, one.note) for one in reports(run)[0].figures}
    assert figures["loss"] == ("not finite", "since step 91; before: 3.0000")
    assert figures["validation loss"] == ("4.0000", "best, at step 100; last not finite")
    json.loads(json.dumps(numbers_of(reports(run)), allow_nan=False))
    (run / "metrics.jsonl").write_text("".join(lines[:90]))
    assert figure(reports(run)[0], "loss") == 3.0


def test_steps_that_were_taken_again_count_once_and_the_first_time_is_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = [line(step, NOW + step, loss=5.0) for step in range(1, 8)]
    again = [line(step, NOW + 100 + step, loss=3.0) for step in range(5, 10)]
    (run / "metrics.jsonl").write_text("".join(first[:4] + again))
    (run / "metrics.undone.jsonl").write_text("".join(first[4:]))
    write_sessions(run, session(0, NOW, NOW), session(4, NOW + 100, NOW + 104))
    (report,) = reports(run)
    drawn = line_of(report, "loss", "each step")
    assert drawn == {step: 5.0 if step < 5 else 3.0 for step in map(float, range(1, 10))}
    assert report.lines.lost.steps.tolist() == [5, 6, 7]
    assert line_of(report, "loss", "lost") == {5: 5.0, 6: 5.0, 7: 5.0}
    assert [one.lost_steps for one in report.sessions] == [3, 0]
    assert [one.kept_step for one in report.sessions] == [4, 9]


def test_of_a_step_that_is_logged_twice_the_later_line_counts(tmp_path: Path) -> None:
    (reader,) = open_runs([run := make_run(tmp_path, done=5)])
    reader.read_on()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(4, NOW, loss=7.0) + line(4, NOW, loss=8.0) + line(6, NOW, loss=9.0))
    reader.read_on()
    assert reader.lines.logged.steps.tolist() == [1, 2, 3, 4, 6]
    assert reader.lines.logged["loss"].tolist()[3:] == [8.0, 9.0]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    bad = ['[1]', '{"step": "x", "loss": 1}', '{"step": 1e400, "loss": 1}', "{", "null",
           '{"step": -3, "loss": 1}', '{"step": 2, "loss": "high", "time": {"a": []}}',
           '{"step": 3, "loss": 1' + "0" * 400 + "}", "[" * 3000]  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join([line(1, NOW).strip(), *bad, line(4, NOW + 9)]))
    (report,) = reports(run)
    assert list(line_of(report, "loss", "each step")) == [1, 4]
    build_page([report])


def test_nothing_but_garbage_in_every_file_still_is_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=3)
    for name in ("sessions.jsonl", "attempts.jsonl", "samples.jsonl", "model_config.json",
                 "live.json", "metrics.undone.jsonl"):  # fmt: skip
        (run / name).write_bytes(b'{"event": 3, "time": "x"}\n\xff\xfe[[[\n{"event": "start"}\n')
    for name in ("data/plan.json", "data/ledger.bin", "evaluations/step_2/a.json"):
        (run / name).parent.mkdir(exist_ok=True, parents=True)
        (run / name).write_bytes(b"\0\1 OVLL{")
    (run / "config.toml").write_bytes(b"[training\nsteps = ")
    (report,) = reports(run)
    page = build_page([report])
    assert "Curves" in page
    assert "Unknown: config.toml cannot be read" in page
    assert report.facts == report.settings == [], "no default is made up"


HUGE = 10**400


@pytest.mark.parametrize("step", ['"x"', "1.5", "null", "-2", "1000000000000000000000"])
def test_a_step_that_is_none_among_lines_of_one_form_is_passed_over(
    tmp_path: Path, step: str
) -> None:
    run = make_run(tmp_path)
    lines = "".join(f'{{"step": {one}, "loss": 2.5}}\n' for one in ("1", "2", step, "3"))
    (run / "metrics.jsonl").write_text(lines)
    assert list(line_of(*reports(run), "loss", "each step")) == [1, 2, 3]


@pytest.mark.parametrize(
    "odd",
    [math.nan, math.inf, -math.inf, HUGE, -HUGE, 1e308, True, "x", []],
    ids=["nan", "inf", "-inf", "huge", "-huge", "1e308", "true", "x", "list"],
)
def test_odd_numbers_in_events_are_no_traces(tmp_path: Path, odd: Any) -> None:
    def session_with(name: str) -> list[dict[str, Any]]:
        seconds = {"compute": odd, "data": odd}
        return [
            {**session(0, NOW - 50, NOW - 49), name: odd},
            {"time": NOW - 9, "event": "save", "step": odd, "saved": odd, "seconds": odd},
            {"time": NOW - 8, "event": "rewind", "step": odd, "undone": odd},
            {"time": NOW, "event": "end", "step": odd, "how": odd, "seconds": seconds},
        ]

    run = make_run(tmp_path, done=5)
    for name in ("begun", "step", "devices", "nodes", "rows", "parameters", "degrees"):
        write_sessions(run, *session_with(name))
        found = reports(run)
        build_page(found)
        json.dumps(numbers_of(found), allow_nan=False)
    (run / "sessions.jsonl").unlink()
    add_events(run, {**SESSION, "ends": odd}, {"event": "preflight", "bad": odd, "seconds": odd},
               {**ATTEMPT, "from_step": odd, "nodes": odd}, {**FAULT, "excluded": odd, "step": odd},
               {**FAULT, "time": odd}, {"event": odd})  # fmt: skip
    assert "node lost" in build_page(reports(run))


@pytest.mark.parametrize("config", ["training = 3", "job = [1]", f"[training]\nsteps = {HUGE}",
                                    "[checkpoint]\nfolder = 3"], ids=range(4))  # fmt: skip
def test_a_config_of_another_shape_still_is_a_page(tmp_path: Path, config: str) -> None:
    run = make_run(tmp_path, done=5)
    (run / "config.toml").write_text(config)
    assert "Curves" in build_page(reports(run))


def test_a_run_of_images_has_no_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "config.toml").write_text("[training]\nsteps = 9\nseq_len = 2048\n")
    write_sessions(run, session(0, NOW - 9, NOW - 8, rows=64, unit="samples"))
    assert dict(reports(run)[0].facts)["batch"] == "64 samples per step"


def test_values_near_the_ends_of_a_float_are_a_page(tmp_path: Path) -> None:
    for size in (1.7e308, 1e299, 5e-324):
        run = make_run(tmp_path)
        lines = (line(step, NOW, loss=size, grad_norm=-size) for step in range(1, 3000))
        (run / "metrics.jsonl").write_text("".join(lines))
        found = reports(run)
        assert "nan" not in build_page(found).split("<main")[1].split("<script")[0].split()
        json.dumps(numbers_of(found), allow_nan=False)


def test_a_clock_that_was_set_back_between_sessions_gives_each_its_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lines = [line(step, NOW + step) for step in range(1, 20)]
    lines += [line(step, NOW - 1000 + step) for step in range(20, 30)]
    (run / "metrics.jsonl").write_text("".join(lines))
    end = {"time": NOW + 19.5, "event": "end", "step": 19, "how": "stopped"}
    write_sessions(run, session(0, NOW - 1, NOW), end, session(19, NOW - 1001, NOW - 1000))
    (report,) = reports(run)
    assert [(one.step, one.last_step) for one in report.sessions] == [(0, 19), (19, 29)]
    assert [one.how for one in report.sessions] == ["stopped", "killed"]
    assert [round(one.ended - one.begun, 1) for one in report.sessions] == [20.5, 30.0]


def test_time_that_was_spent_on_steps_before_a_rewind_is_lost(tmp_path: Path) -> None:
    """A spike at step 8 sends the run back to 5; of what was logged, 6 and 8 were lost."""
    run = make_run(tmp_path)

    def at(step: int, taken: int) -> str:
        return line(step, NOW + taken, seconds={"compute": float(taken), "data": 0.0})

    (run / "metrics.jsonl").write_text("".join([at(2, 2), at(4, 4), at(6, 9), at(8, 11)]))
    (run / "metrics.undone.jsonl").write_text(at(6, 6) + at(8, 8))
    rewind = {"time": NOW + 8, "event": "rewind", "step": 5, "undone": 3}
    end = {"time": NOW + 12, "event": "end", "step": 8, "how": "stopped",
           "seconds": {"compute": 12.0, "data": 0.0}}  # fmt: skip
    write_sessions(run, session(0, NOW, NOW), rewind, end)
    (report,) = reports(run)
    assert report.goodput.parts["lost"] == pytest.approx(3.0)
    assert report.goodput.parts["compute"] == pytest.approx(9.0)
    assert [one.lost_steps for one in report.sessions] == [3]
    write_sessions(run, session(0, NOW, NOW), rewind, {**end, "step": 5})
    (run / "metrics.jsonl").write_text(at(2, 2) + at(4, 4))
    (report,) = reports(run)
    assert [(one.last_step, one.kept_step) for one in report.sessions] == [(8, 5)]
    assert [one.lost_steps for one in report.sessions] == [3]


def test_a_million_steps_are_a_small_page_and_no_spike_is_lost(tmp_path: Path) -> None:
    run, spike = make_run(tmp_path, steps=1_000_000), 777_123
    usual, odd = '{"step": %d, "loss": 2.5}\n', '{"step": %d, "loss": 99.5}\n'
    lines = list(map(usual.__mod__, range(1, 1_000_001)))
    lines[spike - 1] = odd % spike
    (run / "metrics.jsonl").write_text("".join(lines))
    (report,) = reports(run)
    assert len(report.lines.logged) == 1_000_000
    page = build_page([report])
    assert len(page) < 3_000_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])  # type: ignore[index]
    raw, fine, coarse, *_ = data["charts"][0]["lines"]
    assert (fine["name"], coarse["name"]) == ("mean of 100 steps", "mean of 15,000 steps")
    place = raw["values"].index(99.5)
    assert sum(raw["steps"][: place + 1]) == spike
    assert sum(len(one["values"]) for chart in data["charts"] for one in chart["lines"]) <= (
        MOST_POINTS + 4
    )


# Numbers


def test_what_is_read_is_what_was_logged(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lines = []
    for step in range(1, 400):
        lines.append(line(step, NOW + step, loss=math.pi / step, mfu=None, grad_norm=1e-9 * step,
                          seconds={"data": 0.1 * step, "compute": step}))  # fmt: skip
        if step % 50 == 0:
            held = {"step": step, "validation_loss": 2.0, "validation_loss/c4": 2.0, "time": NOW}
            lines.append(json.dumps(held) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    read = Lines(run)
    read.read_on()
    whole = [json.loads(one) for one in lines if '"grad_norm"' in one]
    assert read.logged.steps.tolist() == [one["step"] for one in whole]
    assert read.logged["loss"].tolist() == [one["loss"] for one in whole], "to the last bit"
    waits = [one["seconds"]["data"] for one in whole]
    assert read.logged["seconds/data"].tolist() == waits
    assert np.isnan(read.logged["mfu"]).all()
    assert read.held_out["validation_loss/c4"].steps.tolist() == list(range(50, 400, 50))


@pytest.mark.parametrize(("steps", "sizes"), [(1, (1, 1)), (60, (2, 10)), (600, (20, 100)),
    (2_000, (100, 500)), (73_500, (100, 15_000)), (10**6, (100, 15_000))])  # fmt: skip
def test_bins_are_those_of_the_field_or_what_fits(steps: int, sizes: tuple[int, int]) -> None:
    assert bin_sizes(steps) == sizes


def test_means_are_of_the_steps_up_to_each_place_and_reach_the_last() -> None:
    steps = np.arange(1.0, 13.0)
    found = [one.tolist() for one in means(steps, steps**2, 5)]
    assert found == [[5, 10, 12], [11, 66, np.mean([64, 81, 100, 121, 144])]]
    rare = np.arange(10.0, 101.0, 10.0)
    assert [one.tolist() for one in means(rare, rare, 20)][1][-1] == 95
    spike = np.where(steps == 3, 1e20, 2.0)  # which rounds nothing but its own mean
    assert means(steps, spike, 5)[1].tolist() == [2e19, 2, 2]


def test_there_is_no_mean_of_single_values() -> None:
    assert bin_sizes(100, spacing=1) == (5, 20)
    assert bin_sizes(100, spacing=10) == (1, 20)
    assert bin_sizes(100, spacing=20) == (1, 1)


def test_thinning_keeps_highest_lowest_first_and_last_of_every_stretch() -> None:
    draw = np.random.default_rng(0)
    steps, values = np.arange(100_000.0), draw.normal(size=100_000)
    values[[31_415, 92_653]] = 40.0, -40.0
    kept_steps, kept = thinned(steps, values, 1000)
    assert len(kept) <= 1002
    assert (kept == values[kept_steps.astype(int)]).all()
    for first in range(0, 100_000, 200):
        stretch = (kept_steps >= first) & (kept_steps < first + 200)
        part = values[first : first + 200]
        assert {part.min(), part.max()} <= set(kept[stretch].tolist())
    assert kept_steps[[0, -1]].tolist() == [0, 99_999]


def test_all_time_is_accounted_for(tmp_path: Path) -> None:
    """Two sessions, the first killed after step 8 and resumed from 5."""
    run = make_run(tmp_path)

    def at(step: int, when: float, spent: float) -> str:
        seconds = {"compute": 2.0 * spent, "data": 0.5 * spent, "save": 0.25 * spent}
        return line(step, NOW + when, seconds={**seconds, "validation": 0.0})

    kept = [at(step, 10 + 2.75 * step, step) for step in range(1, 6)]
    lost = [at(step, 10 + 2.75 * step, step) for step in range(6, 9)]
    again = [at(step, 110 + 2.75 * (step - 5), step - 5) for step in range(6, 11)]
    (run / "metrics.jsonl").write_text("".join(kept + again))
    (run / "metrics.undone.jsonl").write_text("".join(lost))
    end = {"time": NOW + 130, "event": "end", "step": 10, "how": "finished",
           "seconds": {"compute": 10.0, "data": 2.5, "save": 1.25, "validation": 0.0}}  # fmt: skip
    write_sessions(run, session(0, NOW, NOW + 10), session(5, NOW + 90, NOW + 110), end)
    (report,) = reports(run)
    parts = report.goodput.parts
    assert parts["compute"] == pytest.approx(2.0 * 5 + 10.0)
    assert parts["data"] == pytest.approx(0.5 * 5 + 2.5)
    assert parts["lost"] == pytest.approx(2.75 * 3)
    assert parts["start"] == pytest.approx(10 + 20)
    wall = (10 + 2.75 * 8) + 40
    assert report.goodput.in_sessions == pytest.approx(wall)
    assert report.goodput.between == pytest.approx(90 - (10 + 2.75 * 8))
    assert figure(report, "goodput") == pytest.approx(20 / wall)


def test_faults_of_a_supervisor_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=50)
    add_events(run, {**SESSION, "time": NOW - 200}, {**ATTEMPT, "time": NOW - 190},
               {**FAULT, "time": NOW - 20}, {**ATTEMPT, "attempt": 2, "from_step": 40,
               "time": NOW - 15})  # fmt: skip
    assert "node lost: n2 does not answer → restart without n2" in build_page(reports(run))
    write_sessions(run, session(0, NOW - 189, NOW - 180), session(40, NOW - 14, NOW - 10))
    (report,) = reports(run)
    assert [one.what for one in report.sessions] == ["node lost: n2 does not answer", ""]
    assert "node lost: n2 does not answer → restart without n2" in build_page([report])


# Several runs


def test_runs_of_different_lengths_share_their_axes(tmp_path: Path) -> None:
    long, short = make_run(tmp_path / "a" / "run", done=300), make_run(tmp_path / "b/run", done=40)
    found = reports(long, short)
    assert [one.name for one in found] == ["a/run", "b/run"]
    (chart,) = [one for one in charts_of(found) if one.id == "grad_norm"]
    assert [one.steps[-1] for one in chart.lines] == [300, 40]
    assert len({one.color for one in chart.lines}) == 2
    page = build_page(found)
    assert "2 runs side by side" in page
    assert page.count('data-chart="loss"') == 1


def test_a_run_without_steps_beside_one_with(tmp_path: Path) -> None:
    assert "b" in build_page(reports(make_run(tmp_path / "a", done=9), make_run(tmp_path / "b")))


# Text of others


def test_text_of_others_is_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<run>", done=5)
    (run / "config.toml").write_text(
        f"[job]\ndescription = {json.dumps(HOSTILE)}\n[training]\nsteps = 9\ndataset = '<i>x'\n"
        "['<s>']\n'<k>' = '<v>'\n"
    )
    (run / "samples.jsonl").write_text(json.dumps({"step": 5, "text": HOSTILE}) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(6, NOW + 1, **{HOSTILE: 1.0}))
        file.write(json.dumps({"step": 6, f"validation_loss/{HOSTILE}": 1.0}) + "\n")
    write_sessions(run, session(0, NOW - 9, NOW - 8, machine=HOSTILE, job=HOSTILE, nodes=[HOSTILE]),
                   {"time": NOW, "event": "message", "step": 1, "what": HOSTILE})  # fmt: skip
    page = build_page(reports(run))
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    for tag in ("<img", "<i>", "<s>", "<k>", "<v>", "<run>", "\0"):
        assert tag not in page
    assert "owned" in page


def test_json_in_a_script_cannot_end_it() -> None:
    written = json_in_script({"a": "</script><!-- &\u2028"})
    assert not set("<>&\u2028") & set(written)
    assert json.loads(written) == {"a": "</script><!-- &\u2028"}


# The command


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def test_the_command_writes_page_plots_and_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=30)
    done = invoke("report", run, "--svg", tmp_path / "plots")
    assert done.exit_code == 0, done.output
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    loss = (tmp_path / "plots" / "loss.svg").read_text()
    assert "var(--" not in loss, "it stands alone"
    assert "Training loss" in loss
    said = json.loads(invoke("report", run, "--json").stdout)
    (raw, *_) = said["charts"][0]["lines"]
    assert raw["steps"] == list(range(1, 31))
    assert raw["values"] == [float(f"{10 / (1 + step):.6g}") for step in range(1, 31)]
    assert said["runs"][0]["figures"]["steps"] == 30


def test_every_plot_has_a_file_of_its_own(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, done=3) for name in ("日本", "中国", "a b", "A_b", "x" * 99)]
    runs.append(make_run(tmp_path / ("x" * 99 + "y"), done=3))
    for run in runs:
        write_sessions(run, session(0, NOW - 9, NOW - 8))
    written = write_plots(reports(*runs), tmp_path / "plots")
    names = {path.name.lower() for path in (tmp_path / "plots").iterdir()}
    assert len(names) == len(written)
    assert {"timeline.日本.svg", "timeline.中国.svg", "timeline.a_b-2.svg"} <= names


def test_what_cannot_be_reported_is_one_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for words, sentence in (
        ((tmp_path / "nowhere",), "does not exist"),
        ((tmp_path / "loop",), "does not exist"),
        ((tmp_path / "empty",), "is not a run folder"),
        ((run, run), "is given twice"),
        ((run, "--output", tmp_path), "is a folder: name a file"),
        ((run, "--output", run / "config.toml" / "x.html"), "use --output to write another file"),
    ):
        done = invoke("report", *words)
        assert done.exit_code == 2, done.output
        assert sentence in done.stderr
        assert "Traceback" not in done.output


def test_perplexities_of_validation_sets_have_a_chart_and_losses_come_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=4)
    with (run / "metrics.jsonl").open("a") as file:
        for name in ("wiki", "c4"):
            held = {"step": 4, f"validation_loss/{name}": 2.0, f"validation/{name}/loss": 2.0,
                    f"validation/{name}/perplexity": 7.5}  # fmt: skip
            file.write(json.dumps(held) + "\n")
    (report,) = reports(run)
    assert line_of(report, "held_out.validation_perplexity", "wiki") == {4: 7.5}
    assert line_of(report, "held_out.validation_loss", "c4") == {4: 2.0}


# Evaluations


def keep(run: Path, step: int, name: str, record: dict[str, Any]) -> None:
    path = run / "evaluations" / f"step_{step}" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step": step, **record}))


def test_evaluations_of_several_checkpoints_are_a_table_and_a_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=20)
    for step, value in ((10, 0.25), (20, 0.5)):
        score = {"task": "arc_easy", "shots": 5, "filter": "none", "metric": "acc", "value": value,
                 "stderr": 0.0125}  # fmt: skip
        keep(run, step, "tasks-arc", {"kind": "tasks", "name": "arc", "scores": [score]})
        keep(run, step, "perplexity-c4", {"kind": "perplexity", "name": "c4", "loss": 2.5 + value,
             "perplexity": 12.25, "tokens": 100, "word_perplexity": None})  # fmt: skip
    (report,) = reports(run)
    page = build_page([report])
    assert "arc_easy, 5-shot" in page
    assert "0.5 ± 0.013" in page
    assert line_of(report, "score.acc") == {10: 0.25, 20: 0.5}
    assert line_of(report, "score.perplexity", "c4") == {10: 12.25, 20: 12.25}
    assert not any(one.metric in ("tokens", "word perplexity") for one in report.scores)


def test_evaluations_of_one_name_with_other_settings_stay_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=20)
    for key, loss in (("abcdef12", 2.0), ("98765432", 3.0)):
        keep(run, 20, f"perplexity-c4-{key}", {"kind": "perplexity", "name": "c4", "loss": loss,
             "key": key})  # fmt: skip
    (report,) = reports(run)
    assert {one.name: one.value for one in report.scores} == {
        "c4 (abcdef)": 2.0,
        "c4 (987654)": 3.0,
    }
