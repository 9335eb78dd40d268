"""Adds to docs/ what the site has besides, each time that it is built: the front page, which is
README.md, and other files of the repository that pages link to (repository.py); the reference of
the config (config_pages.py), the command line (command_pages.py) and Python (python_page.py), made
from the code; and a list of the evidence.

MkDocs calls the functions whose names begin with `on_`."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

import command_pages
import config_pages
import python_page
import repository
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REFERENCE = """\
# Reference

These pages are made from the code each time that the site is built.

| | |
|---|---|
| [Config keys](config/index.md) | every section and key, with type, default and meaning |
| [Command line](command/index.md) | every command, with its options and examples |
| [Python API](python.md) | every public name of `import overland` |
"""

EVIDENCE = """\
# Evidence

The measurements and proofs behind what these docs claim. `make prove-all` repeats most of those \
that need no GPU."""


def on_config(config: MkDocsConfig) -> None:
    config.nav = expand(config.nav or [], pages_of(config.docs_dir), listed(config.nav))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {**generated_pages(), "evidence/index.md": evidence_index(config.nav or [])}
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.parent is None:  # there is no menu of its own to show
        page.meta["hide"] = ["navigation"]
    return repository.with_links_of_the_site(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    return with_links_to_the_reference(html, page.file.src_uri)


@cache
def generated_pages() -> dict[str, str]:
    """Pages of the site that are no files in docs/, in the order in which menus list them."""
    return {
        "reference/index.md": REFERENCE,
        **config_pages.pages(),
        **command_pages.pages(),
        "reference/python.md": python_page.page(),
        **repository.pages(),
    }


def evidence_index(nav: list[Any]) -> str:
    """Lists the pages of evidence as the menu groups them."""
    (menu,) = [item["Evidence"] for item in nav if "Evidence" in item]
    parts = [EVIDENCE]
    for title, uris in [group for item in menu if isinstance(item, dict) for group in item.items()]:
        links = [f"- [{title_of(uri)}]({posixpath.relpath(uri, 'evidence')})" for uri in uris]
        parts.append(f"## {title}\n\n" + "\n".join(links))
    return "\n\n".join(parts) + "\n"


def title_of(uri: str) -> str:
    text = (repository.DOCS / uri).read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")


def pages_of(docs: str) -> list[str]:
    own = [path.relative_to(docs).as_posix() for path in sorted(Path(docs).rglob("*.md"))]
    return list(dict.fromkeys([*generated_pages(), *own]))


def listed(nav: Any) -> set[str]:
    """Returns the pages that a menu names, patterns among them."""
    if isinstance(nav, str):
        return {nav}
    items = nav.values() if isinstance(nav, dict) else nav or []
    return {page for item in items for page in listed(item)}


def expand(nav: list[Any], pages: list[str], taken: set[str]) -> list[Any]:
    """Returns the menu with each pattern replaced by the pages that match it and are not taken,
    by their name or by an earlier pattern."""
    menu: list[Any] = []
    for item in nav:
        if isinstance(item, str) and "*" in item:
            folder = posixpath.dirname(item)
            same = [page for page in pages if posixpath.dirname(page) == folder]
            matching = [page for page in fnmatch.filter(same, item) if page not in taken]
            taken.update(matching)
            menu += matching
        elif isinstance(item, dict):
            menu += [
                {title: expand(inside, pages, taken) if isinstance(inside, list) else inside}
                for title, inside in item.items()
            ]
        else:
            menu.append(item)
    return menu


# Code that is a link already, stands in a heading, or is a block, stays as it is.
CODE = re.compile(r"<a\b.*?</a>|<h\d.*?</h\d>|<pre.*?</pre>|<code>([^<]+)</code>", re.DOTALL)


def with_links_to_the_reference(html: str, page: str) -> str:
    """Makes links of the keys, commands and Python names in a page."""

    def link(found: re.Match[str]) -> str:
        target = reference_to(found[1]) if found[1] else None
        if target is None:
            return found[0]
        uri, _, anchor = target.partition("#")
        address = posixpath.relpath(uri, posixpath.dirname(page)).removesuffix(".md") + ".html"
        return f'<a href="{address}{"#" + anchor if anchor else ""}">{found[0]}</a>'

    return CODE.sub(link, html)


def reference_to(code: str) -> str | None:
    """Returns where the reference explains a key, a command or a Python name."""
    key = code.partition("=")[0].strip()
    return config_pages.place_of(key) or command_pages.place_of(code) or python_page.place_of(code)
