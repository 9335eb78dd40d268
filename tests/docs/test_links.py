"""Links between pages work, and commands on the pages exist."""

import re
from pathlib import Path

import pytest

from tests.cli.processes import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target


def test_every_file_that_a_page_or_a_docstring_names_is_there() -> None:
    """Python files, by their path in the project, in the package, or where scripts are copied."""
    copied = [folder for folder in (ROOT / "overland" / "scripts").iterdir() if folder.is_dir()]
    texts = [*PAGES, *(ROOT / "overland").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    for path in texts:
        names = re.findall(r"(?<![\w./-])((?:\w+/)+\w+\.py)\b", path.read_text(encoding="utf-8"))
        for name in names:
            folders = [ROOT, ROOT / "overland", path.parent, *copied]
            found = [folder / name for folder in folders]
            assert any(one.exists() for one in found), f"{path.relative_to(ROOT)}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_exist(page: Path) -> None:
    """In blocks without a language, which hold what a user types."""
    from overland.cli.main import app

    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    verbs |= {group.name for group in app.registered_groups}
    for block in re.findall(r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"),
                            flags=re.MULTILINE | re.DOTALL):  # fmt: skip
        for verb in re.findall(r"^(?:\$ )?overland (\w+)", block, flags=re.MULTILINE):
            assert verb in verbs, f"overland {verb}"


def test_every_key_that_a_page_names_is_in_the_schema() -> None:
    from overland.config.fields import all_keys

    keys = set(all_keys())
    sections = {key.partition(".")[0] for key in keys}
    ours = [page for page in PAGES if page.name in ("train.md", "extending.md", "generate.md")]
    assert len(ours) == 3
    for page in ours:
        for key in re.findall(r"`(\w+\.\w+)(?:[ =][^`]*)?`", page.read_text(encoding="utf-8")):
            if key.partition(".")[0] in sections and not key.endswith(
                (".md", ".toml", ".json", ".jsonl")
            ):
                assert key in keys, f"{page.name}: {key}"
