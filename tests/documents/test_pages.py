"""No page of docs/coming-from for a document shows a command that no test runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from overland.config.load import load_config
from tests.cli.processes import ROOT
from tests.documents.scripts import copied, page_commands, shown, typed, typed_in_tests
from tests.hub.server import Hub

PAGES = ("stub", "torchtitan", "frontier", "fsdp-playground", "frontier-sft")
LINES = Path(__file__).with_name("lines.txt")


def listed_lines() -> dict[str, str]:
    """Lines of the pages that are typed with other numbers, names or places: by which test."""
    found, test = {}, ""
    for line in LINES.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            found[line.strip()] = test
        elif not line.startswith("#"):
            test = line
    return found


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_typed_by_a_test(page: str) -> None:
    strings, listed, commands = typed_in_tests(), listed_lines(), page_commands(page)
    assert len(commands) > 3
    known = lambda command: command in listed or any(command in one for one in strings)
    assert [command for command in commands if not known(command)] == []


def test_the_tests_that_are_named_are_there_and_the_lines_too() -> None:
    listed = listed_lines()
    for test in {*listed.values()}:
        file, _, name = test.partition("::")
        assert file.startswith("none") or name in functions_of(LINES.parent / file), test
    assert listed.keys() <= {command for page in PAGES for command in page_commands(page)}


def test_the_stubs_yaml_is_written_in_todays_keys(tmp_path: Path) -> None:
    copied("stub", tmp_path)
    shown("overland config convert test_config_training.yaml run.toml", tmp_path)
    old, new = (
        load_config(str(tmp_path / name), env={}).config
        for name in ("test_config_training.yaml", "run.toml")
    )
    assert new == old


def test_what_the_walkthrough_needs_is_fetched_where_it_looks(hub: Hub, tmp_path: Path) -> None:
    shown("overland init --from frontier-sft", tmp_path)
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
    hub.add("meta-llama/Meta-Llama-3-8B", files)
    hub.add("mlabonne/guanaco-llama2-1k", {"data/train.parquet": b"rows"}, kind="dataset")
    scratch = tmp_path / "scratch"
    for line in (
        "overland fetch model meta-llama/Meta-Llama-3-8B --to $SCRATCH_ROOT/llama-models-cache",
        "overland fetch tokenizer meta-llama/Meta-Llama-3-8B "
        "--to $SCRATCH_ROOT/llama-tokenizers-cache",
        "overland fetch dataset mlabonne/guanaco-llama2-1k "
        "--to $SCRATCH_ROOT/data_cache/mlabonne___guanaco-llama2-1k",
    ):
        here = line.replace("$SCRATCH_ROOT", str(scratch))
        shown(here, tmp_path, env={"HF_ENDPOINT": hub.url})
    for file in (
        "llama-models-cache/model.safetensors",
        "llama-tokenizers-cache/tokenizer.json",
        "data_cache/mlabonne___guanaco-llama2-1k/data/train.parquet",
    ):
        assert (scratch / file).is_file(), file
    assert not (scratch / "llama-tokenizers-cache/model.safetensors").exists()


def test_the_hubs_own_command_takes_the_words_of_the_page(hub: Hub, tmp_path: Path) -> None:
    """huggingface-cli, which the document has, no longer downloads anything."""
    page = (ROOT / "docs/coming-from/frontier-sft.md").read_text()
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
    hub.add("meta-llama/Meta-Llama-3-8B", files)
    lines = re.findall(r"`(hf download [^`]+)`", page)
    assert len(lines) == 3
    (line,) = (line for line in lines if "tokenizer" in line)
    typed(line, tmp_path, HF_ENDPOINT=hub.url, SCRATCH_ROOT=str(tmp_path), HF_HUB_DISABLE_XET="1")
    found = [path.name for path in (tmp_path / "llama-tokenizers-cache").glob("*.json")]
    assert found == ["tokenizer.json"]


def test_the_walkthroughs_recipe_becomes_a_job(tmp_path: Path) -> None:
    shown("overland init --from fsdp-playground", tmp_path)  # elsewhere; files do not meet
    line = "overland submit sft_lora_llama3_8b --site frontier"
    text = shown(line, tmp_path, "--account", "abc", "--nodes", "2", "--dry-run").stdout
    assert "#SBATCH --nodes=2" in text
    assert "[checkpoint]" in shown("overland config reference", tmp_path).stdout


@pytest.mark.long
def test_the_tasks_of_the_document_are_listed_for_fetching(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    listed = shown("overland fetch tasks @frontier", tmp_path, "--dry-run").stdout
    assert "hellaswag" in listed
