"""Evaluation results as tables for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Result = dict[str, Any]

PERPLEXITY = {
    "data": "name",
    "documents": "documents",
    "tokens": "tokens",
    "loss": "loss",
    "perplexity": "perplexity",
    "bits/byte": "bits_per_byte",
    "perplexity/byte": "byte_perplexity",
    "perplexity/word": "word_perplexity",
}
TASKS = {
    "task": "alias",
    "documents": "documents",
    "shots": "shots",
    "filter": "filter",
    "metric": "metric",
    "value": "value",
    "±": "stderr",
}
FINE = ("loss", "bits/byte", "perplexity/byte", "value", "±")
MOST_COLUMNS = 6  # of a curve, not counting the step


def tables(results: Sequence[Result], is_sweep: bool, advises: bool = True) -> Iterator[str]:
    """Yields a table of perplexities and one of scores; for a sweep, one table of all
    checkpoints. `advises`: whether to advise a prefix, which the user has not chosen yet."""
    if is_sweep:
        yield curve(results)
        return
    if perplexities := [one for one in results if one["kind"] != "tasks"]:
        cells = [[one.get(key) for key in PERPLEXITY.values()] for one in perplexities]
        yield aligned(list(PERPLEXITY), cells)
        yield "\n".join(line for one in perplexities for line in about_perplexity(one, advises))
    for one in results:
        if one["kind"] == "tasks":
            cells = [[score.get(key) for key in TASKS.values()] for score in one["scores"]]
            yield aligned(list(TASKS), cells)
            yield "\n".join(about_tasks(one))


def curve(results: Sequence[Result]) -> str:
    """Returns a table with a row per checkpoint and a column per measure; columns that do not fit
    go into further tables below."""
    by_step: dict[int, dict[str, Any]] = {}
    for one in results:
        by_step.setdefault(one["step"], {}).update(measures(one))
    names = list(dict.fromkeys(name for some in by_step.values() for name in some))
    blocks = []
    for start in range(0, len(names), MOST_COLUMNS):
        some = names[start : start + MOST_COLUMNS]
        cells = [[step, *(found.get(name) for name in some)] for step, found in by_step.items()]
        blocks.append(aligned(["step", *some], cells, fine=some))
    return "\n\n".join(blocks)


def measures(result: Result) -> dict[str, Any]:
    """Returns the numbers of a result, by name."""
    if result["kind"] != "tasks":
        return {f"{result['name']} perplexity": result["perplexity"]}
    several = len({score["filter"] for score in result["scores"]}) > 1
    return {
        f"{score['task']} {score['metric']}" + (f" {score['filter']}" if several else ""): score[
            "value"
        ]
        for score in result["scores"]
    }


def aligned(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], fine: Sequence[str] = FINE
) -> str:
    cells = [list(headers)]
    cells += [
        [_cell(value, name in fine) for name, value in zip(headers, row, strict=True)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_words = [all(isinstance(row[i], str) for row in rows) for i in range(len(headers))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if words else text.rjust(width)
            for text, width, words in zip(line, widths, is_words, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: object, is_fine: bool) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4f}" if is_fine else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def about_perplexity(one: Result, advises: bool) -> Iterator[str]:
    """Yields how the numbers were measured, and what they leave out."""
    settings = one["settings"]
    how = "all documents joined" if settings["joined"] else "each document separately"
    yield (
        f"{one['name']}: {how}, windows of {settings['context']:,} tokens every "
        f"{settings['stride']:,}, in {settings['dtype']}"
    )
    if one["unscored"]:
        may_prefix = advises and settings["prefix"] is None and one.get("takes_prefix", True)
        yield (
            f"  {one['unscored']:,} first tokens are not scored, because nothing precedes them"
            + (" (--prefix eos scores them)" if may_prefix else "")
        )
    if one["skipped_documents"]:
        yield f"  {one['skipped_documents']:,} documents could not be read"
    if one["kept"]:
        yield f"  kept in {one['kept']}"


def about_tasks(one: Result) -> Iterator[str]:
    settings = one["settings"]
    parts = [f"prompts of up to {settings['context']:,} tokens", f"in {settings['dtype']}"]
    if settings["chat_template"]:
        parts.insert(0, "as conversations")
    if settings["limit"] is not None:
        parts.append(f"at most {settings['limit']:,} documents of each")
    yield f"{one['name']}: {', '.join(parts)}, by lm_eval {one['versions']['lm_eval']}"
    if one["cut_prompts"]:
        yield f"  {one['cut_prompts']:,} prompts were longer and were truncated on the left"
    if one["kept"]:
        yield f"  kept in {one['kept']}"
