"""The documentation site, built as `make site` builds it and without a network: nothing is missing,
every link leads somewhere, and nothing in a page is loaded from elsewhere."""

from __future__ import annotations

import html
import importlib
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown_it import MarkdownIt

import overland
from overland.apps.reference import reference_rows
from overland.cli.main import app
from tests.cli.processes import ROOT, environment
from tests.reporting.browser import Browser, need_browser

DOCS = ROOT / "docs"
FROM_THE_ROOT = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog",
                 "SECURITY": "security"}  # fmt: skip
MARKDOWN = {
    **{path: path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")},
    **{ROOT / f"{name}.md": Path(f"{page}.html") for name, page in FROM_THE_ROOT.items()},
}
LOADED = {"script": "src", "img": "src", "source": "srcset", "iframe": "src", "video": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    attempts = folder / "attempts"
    path = f"{ROOT / 'tests' / 'cli' / 'offline'}:{ROOT}"
    env = environment(PYTHONPATH=path, OVERLAND_ATTEMPTS=str(attempts), NO_MKDOCS_2_WARNING="1")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder / "site"),
    ]
    built = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not attempts.exists(), attempts.read_text()
    return folder / "site"


def pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


@cache
def tags(page: Path) -> list[tuple[str, dict[str, str]]]:
    """Every tag with its attributes; text that looks like one is escaped in a page."""
    return [
        (
            name,
            {key: html.unescape(value) for key, value in re.findall(r'([\w-]+)="([^"]*)"', rest)},
        )
        for name, rest in re.findall(r"<(\w+)\s([^>]*)>", page.read_text(encoding="utf-8"))
    ]


@cache
def anchors(page: Path) -> set[str]:
    return {given["id"] for _, given in tags(page) if "id" in given}


def article(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def loaded(page: Path) -> Iterator[str]:
    """Yields the address of whatever a browser loads to show a page."""
    for name, given in tags(page):
        if name == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            yield given["href"]
        yield from given.get(LOADED.get(name, ""), "").split()[:1]


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    broken = []
    for page in pages(site):
        links = [given["href"] for name, given in tags(page) if name == "a" and "href" in given]
        for link in [*links, *loaded(page)]:
            if "://" in link or link.startswith("mailto:"):
                continue
            name, _, anchor = link.partition("#")
            target = page if name in ("", ".") else Path(posixpath.normpath(page.parent / name))
            picture = target.suffix in (".svg", ".png")  # there, an anchor is the theme's switch
            if not target.is_file() or (anchor and not picture and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    outside = re.compile(r"^(\w+:)?//")
    found = [
        f"{page.relative_to(site)}: {address}"
        for page in [*pages(site), site / "404.html"]
        for address in loaded(page)
        if outside.match(address)
    ]
    styles = [*site.rglob("*.css"), *pages(site)]
    for path in styles:
        text = path.read_text(encoding="utf-8")
        found += re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)'\"]*", text)
    assert found == []
    assert any("site/style.css" in address for address in loaded(site / "index.html"))


def test_every_page_is_in_a_menu(site: Path) -> None:
    menus = {
        posixpath.normpath(page.relative_to(site).parent / given["href"].partition("#")[0])
        for page in pages(site)
        for name, given in tags(page)
        if name == "a" and re.search(r"md-(nav|tabs)__link", given.get("class", ""))
    }
    for page in pages(site):
        name = page.relative_to(site).as_posix()
        assert name in menus or name.startswith("source/"), name
    for page in MARKDOWN.values():
        assert (site / page).is_file(), page


@pytest.mark.parametrize("source", sorted(MARKDOWN), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_the_parts_that_it_has_on_github(source: Path, site: Path) -> None:
    """The site's Markdown is another dialect: a list without an empty line above it is none, and
    `\\|` in a table stays as it is."""
    tokens = MarkdownIt("commonmark").enable("table").parse(source.read_text(encoding="utf-8"))
    kinds = [token.type for token in tokens]
    there = {
        "headings": kinds.count("heading_open"),
        "rows": kinds.count("tr_open"),
        "items": kinds.count("list_item_open"),
        "blocks": kinds.count("fence") + kinds.count("code_block"),
    }
    patterns = {"headings": r"<h[1-6]\b", "rows": r"<tr\b", "items": r"<li\b", "blocks": r"<pre\b"}
    text = article(site / MARKDOWN[source])
    assert {name: len(re.findall(words, text)) for name, words in patterns.items()} == there
    inline = [one for token in tokens for one in token.children or []]
    spans = [one.content for one in inline if one.type == "code_inline"]
    found = re.findall(r"<pre.*?</pre>|<code>(.*?)</code>", text, flags=re.DOTALL)
    assert [html.unescape(one) for one in found if one] == spans
    prose = re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", text, flags=re.DOTALL)
    assert "](" not in prose
    pictures = [one.attrs["src"] for one in inline if one.type == "image"]
    assert [one for one in pictures if Path(str(one)).name not in prose] == []


REWRITTEN = {
    "[install](docs/install.md#extras)": "[install](install.md#extras)",
    "[house rules](CONTRIBUTING.md)": "[house rules](contributing.md)",
    "[code](overland/errors.py)": "[code](source/overland/errors.py.md)",
    "[all](docs/evidence)": "[all](evidence/index.md)",
    "[site](https://example.org/docs/install.md)": "[site](https://example.org/docs/install.md)",
    "[gone](docs/no_such_page.md)": "[gone](docs/no_such_page.md)",  # the build refuses it
    "`[a](docs/install.md)`": "`[a](docs/install.md)`",
    "```\n[a](docs/install.md)\n```": "```\n[a](docs/install.md)\n```",
    "| `a\\|b` |": "| `a|b` |",
    "grep `a\\|b`": "grep `a\\|b`",
    '<a href="docs/train.md#logs">': '<a href="train.html#logs">',
    '<img width="9" src="docs/images/report-story.png">': (
        '<img width="9" src="images/report-story.png">'
    ),
    "<details>": "<details markdown>",
    '<picture>\n<source srcset="docs/images/report-dark.png">\n'
    '<img src="docs/images/report-light.png" alt="A run">\n</picture>': (
        "![A run](images/report-light.png#only-light)![A run](images/report-dark.png#only-dark)"
    ),
}


@pytest.mark.parametrize("written", REWRITTEN)
def test_what_github_reads_is_rewritten_for_the_site(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    repository = importlib.import_module("repository")
    assert repository.with_links_of_the_site(written, "index.md") == REWRITTEN[written]


def test_the_front_page_is_the_readme(site: Path) -> None:
    title = re.search(r"^# (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    assert title
    assert re.search(rf"<h1[^>]*>{title[1]}", article(site / "index.html"))


def test_pictures_follow_the_mode_of_the_page(site: Path) -> None:
    shown = {
        page: [given["src"] for name, given in tags(page) if name == "img"] for page in pages(site)
    }
    light = [(page, src) for page, all in shown.items() for src in all if "-light." in src]
    assert light
    for page, src in light:
        assert src.endswith("#only-light")
        assert src.replace("light", "dark") in shown[page]


def test_every_key_is_in_the_reference(site: Path) -> None:
    for row in reference_rows():
        page = site / "reference" / "config" / f"{row['section']}.html"
        name = f"{row['section']}.{row['key']}"
        assert name in anchors(page)
        entry = text_of(article(page).partition(f'id="{name}"')[2].partition("<h2")[0])
        assert f"{row['type']} · default: " in entry
        assert " ".join(row["description"].replace("`", "").split()) in entry
    batch = article(site / "reference" / "config" / "training.html")
    assert "default: 8\n" in text_of(batch.partition('id="training.local_batch_size"')[2])


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    top: Any = typer.main.get_command(app)
    options = 0
    for verb, command in top.commands.items():
        page = site / "reference" / "command" / f"{verb}.html"
        assert page.is_file() is not command.hidden
        if command.hidden:
            continue
        text = text_of(article(page))
        for one in getattr(command, "commands", {"": command}).values():
            for param in one.params:
                if not getattr(param, "hidden", False):
                    missing = {word for word in param.opts if word[0] == "-" and word not in text}
                    assert not missing, f"{verb}: {missing}"
                    options += 1
    assert options > 100
    train = article(site / "reference" / "command" / "train.html")
    assert "<code>--skip-optimizer</code>" in train
    assert "overland train quickstart\n" in train


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = site / "reference" / "python.html"
    assert {name for name in overland.__all__ if not name.startswith("_")} <= anchors(page)
    text = text_of(article(page))
    shown = (
        "train( config: JobConfig | str | Path, *, ranks: int | None = None, quiet: bool = False"
    )
    assert shown in " ".join(text.split())
    for name in ("train", "load_config", "evaluate", "Trained"):
        assert getattr(overland, name).__doc__.splitlines()[0].replace("`", "") in text


def test_keys_and_commands_in_a_text_link_to_the_reference(site: Path) -> None:
    text = article(site / "train.html")
    assert re.search(r'<a href="reference/config/\w+\.html#\w+\.\w+"><code>\w+\.\w+', text)
    assert re.search(r'<a href="reference/command/\w+\.html"><code>overland \w+', text)


# Typed until it is heard: on a busy machine, the page listens to its keys only after a while.
SEARCH = """(() => {
    const query = document.querySelector("[data-md-component=search-query]");
    query.focus();
    query.value = "%s";
    for (const name of ["input", "keyup"]) query.dispatchEvent(new Event(name, {bubbles: true}));
    return document.querySelector(".md-search-result__item a") !== null;
})()"""


def test_search_and_narrow_screens_without_a_server(site: Path) -> None:
    with Browser(need_browser()) as browser:
        browser.open(f"file://{site}/reference/config/training.html")
        browser.wait_for(SEARCH % "gc_freq")
        first = browser.evaluate("document.querySelector('.md-search-result__item a').href")
        assert "reference/config/training.html" in first
        assert browser.said == []
        browser.resize(390, 844, mobile=True)
        for page in ("index", "performance", "evidence/trl", "reference/command/submit"):
            browser.open(f"file://{site}/{page}.html")
            assert browser.evaluate("document.documentElement.scrollWidth") == 390, page
            assert browser.said == []
