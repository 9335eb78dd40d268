"""Files outside docs/, or not Markdown, as pages of the site: the front page and its like, and each
source file or folder that some page links to. Links are rewritten to lead to these pages."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent

# File in the repository: its page. Everything else that is linked to goes below source/.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/overland.ipynb": "tutorials/notebook.md",
    "docs/evidence": "evidence/index.md",
}
FILES = {page: path for path, page in PAGES.items()}

PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
# Blocks and spans of code hold no links; they match first.
LINK = re.compile(
    r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence)|`[^`\n]+`"
    r"|(?P<before>!\[(?P<alt>[^\]]*)\]\(|\]\()(?P<target>[^)\s]+)\)"
    r'|(?P<attribute>(?:src|href)=")(?P<address>[^"]+)"|(?P<container><(?:details|div)\b)',
    re.MULTILINE | re.DOTALL,
)


def pages() -> dict[str, str]:
    """Returns the pages made of files of the repository that are none in docs/."""
    made = {page: text_of(path) for path, page in PAGES.items() if (ROOT / path).is_file()}
    own = {
        path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
        for path in DOCS.rglob("*.md")
    }
    todo = {**own, **made}
    while todo:  # a folder's page links to its files
        linked = {path for page, text in todo.items() for path in sources_linked(text, page)}
        todo = {source_uri(path): text_of(path) for path in sorted(linked)}
        todo = {page: text for page, text in todo.items() if page not in made}
        made |= todo
    return made


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Makes links to files of the repository lead to their pages, shows the dark variant of a
    picture in dark mode, and writes in the site's dialect what GitHub reads in another way."""
    markdown = PICTURE.sub(picture_as_image, markdown)

    def rewrite(found: re.Match[str]) -> str:
        if found["target"]:
            return link(found, page)
        if found["address"]:  # which is taken as it is
            address = re.sub(r"\.md(?=#|$)", ".html", address_on_the_site(found["address"], page))
            return f'{found["attribute"]}{address}"'
        if found["container"]:
            return f"{found['container']} markdown"  # so that Markdown is read inside it
        in_table = markdown.startswith("|", markdown.rfind("\n", 0, found.start()) + 1)
        return found[0].replace("\\|", "|") if in_table else found[0]

    return LINK.sub(rewrite, markdown)


def link(found: re.Match[str], page: str) -> str:
    target = address_on_the_site(found["target"], page)
    dark = target.replace("-light.", "-dark.")
    if found["alt"] is not None and dark != target and exists(dark, page):
        return f"![{found['alt']}]({target}#only-light)![{found['alt']}]({dark}#only-dark)"
    return f"{found['before']}{target})"


def picture_as_image(found: re.Match[str]) -> str:
    """Returns the image for light mode; the other is found by its name."""
    image = found[0].partition("<img")[2]
    values = dict(re.findall(r'(\w+)="([^"]*)"', image))
    return f"![{values.get('alt', '')}]({values['src']})"


def exists(target: str, page: str) -> bool:
    return (DOCS / posixpath.join(posixpath.dirname(page), target)).is_file()


def address_on_the_site(target: str, page: str) -> str:
    name, hash_sign, anchor = target.partition("#")
    path = repository_path(name, page)
    if path is None:
        return target
    own = path.removeprefix("docs/") if in_docs(path) else source_uri(path)
    uri = PAGES.get(path, own)
    return posixpath.relpath(uri, posixpath.dirname(page) or ".") + hash_sign + anchor


def repository_path(name: str, page: str) -> str | None:
    """Returns what a link leads to, as a path in the repository, if that is there."""
    if not name or "://" in name or name.startswith("mailto:"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(file_of(page)), name))
    return path if (ROOT / path).exists() and not path.startswith("..") else None


def sources_linked(markdown: str, page: str) -> Iterator[str]:
    for found in LINK.finditer(markdown):
        target = found["target"] or found["address"] or ""
        path = repository_path(target.partition("#")[0], page)
        if path and path not in PAGES and not in_docs(path):
            yield path


def in_docs(path: str) -> bool:
    """Whether it is a page or a picture that lies in docs/."""
    return path.startswith("docs/") and path.endswith((".md", ".svg", ".png"))


def source_uri(path: str) -> str:
    return f"source/{path.removesuffix('.md')}.md"


def file_of(page: str) -> str:
    """Returns the file that a page is made of; links in it are relative to where that lies."""
    if page.startswith("source/"):
        path = page.removeprefix("source/")
        return path if (ROOT / path).exists() else path.removesuffix(".md")
    return FILES.get(page, f"docs/{page}")


def text_of(path: str) -> str:
    file = ROOT / path
    if file.is_dir():
        return folder_page(path)
    text = file.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return notebook_page(text) if path.endswith(".ipynb") else source_page(path, text)


NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def source_page(path: str, text: str) -> str:
    fence = "`" * (3 + max(map(len, re.findall("`{3,}", text)), default=0))
    language = Path(path).suffix.removeprefix(".").replace("txt", "text")
    return f"{NOT_SEARCHED}# `{path}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def folder_page(path: str) -> str:
    files = sorted(one for one in (ROOT / path).iterdir() if one.is_file())
    name = posixpath.basename(path)
    lines = [f"- [`{one.name}`]({name}/{one.name})" for one in files]
    return f"{NOT_SEARCHED}# `{path}`\n\n" + "\n".join(lines) + "\n"


def notebook_page(text: str) -> str:
    cells = json.loads(text)["cells"]
    blocks = [(cell["cell_type"], "".join(cell["source"]).rstrip()) for cell in cells]
    return (
        "\n\n".join(
            f"```python\n{source}\n```" if kind == "code" else source for kind, source in blocks
        )
        + "\n"
    )
