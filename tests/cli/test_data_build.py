import json
from pathlib import Path

import numpy as np
import pytest

from overland.cli.data_build import check_apart, find_part, report_bos
from overland.data.corpus import Corpus
from overland.data.layout import read_layout
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from tests.cli.processes import TINY, interrupt, losses, overland, start_overland
from tests.data.making import bytes_of, tokenizer_in, write_lines
from tests.data.tokenizer_folders import write_bpe
from tests.waiting import wait_until


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tokenizer_in(tmp_path / "words")
    write_lines(tmp_path / "lines", 3)
    return tmp_path


def many_shards(path: Path, count: int) -> None:
    """Token ids, of which 4,096 rows are a shard."""
    np.save(path, np.arange(4096 * count * 2, dtype=np.uint32).reshape(-1, 2))


BUILD = ["data", "build", "lines", "--tokenizer", "words"]


def test_build_ends_with_a_table_and_the_line_for_a_config(here: Path) -> None:
    page = overland(*BUILD, cwd=here).stdout
    rows = dict(line.split(maxsplit=1) for line in page.splitlines()[:7])
    assert rows["documents"] == "60"
    assert rows["skipped"] == "0"
    assert rows["shards"] == "1"
    folder = here / rows["folder"]
    assert folder.parent == here / "data"
    assert folder.name.startswith("lines-")
    assert page.endswith(f'[training]\ndataset_path = "{folder}"\n')
    corpus = Corpus(folder)
    assert corpus.is_complete
    found = json.loads(overland("data", "inspect", str(folder), "--json", cwd=here).stdout)
    assert (found["format"], found["documents"]) == ("corpus", 60)
    assert rows["tokens"] == f"{found['tokens']:,}"


def test_build_as_json_says_all_it_did(here: Path) -> None:
    words = [*BUILD, "--json", "--out", "corpora", "--name", "words", "--bos", "--no-eos"]
    done = overland(*words, cwd=here, code=2)
    assert "no beginning-of-document token" in done.stderr
    words.remove("--bos")
    found = json.loads(overland(*words, cwd=here).stdout)
    assert found["complete"]
    assert (found["documents"], found["skipped"], found["shards"], found["made"]) == (60, 0, 1, 1)
    corpus = Corpus(here / found["folder"])
    assert corpus.name == "words"
    assert corpus.shard(0).tokens[-1] != corpus.eos_id
    again = json.loads(overland(*words, cwd=here).stdout)
    assert (again["made"], again["folder"]) == (0, found["folder"])


def test_what_the_tokenizer_decides_about_bos_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bpe(tmp_path)
    report_bos(Tokenizer(tmp_path))
    assert "documents begin with <s>, by the convention" in capsys.readouterr().err
    report_bos(Tokenizer(tmp_path, add_bos=False))
    assert "(--bos builds a separate corpus)" in capsys.readouterr().err


def test_parts_of_a_job_array_make_the_whole(here: Path) -> None:
    many_shards(here / "tokens.npy", 5)
    build = ["data", "build", "tokens.npy", "--json"]
    whole = json.loads(overland(*build, "--out", "whole", cwd=here).stdout)
    assert (whole["shards"], whole["documents"]) == (5, 5 * 4096)
    tasks = {"SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "2"}
    words = [*build, "--array"]
    first = json.loads(overland(*words, cwd=here, SLURM_ARRAY_TASK_ID="5", **tasks).stdout)
    assert not first["complete"]
    second = json.loads(overland(*words, cwd=here, SLURM_ARRAY_TASK_ID="4", **tasks).stdout)
    assert second["complete"]
    assert first["made"] + second["made"] == whole["shards"]
    assert (second["documents"], second["tokens"]) == (whole["documents"], whole["tokens"])
    assert bytes_of(here / second["folder"]) == bytes_of(here / whole["folder"])


def test_a_part_is_counted_from_one_or_given_by_slurm() -> None:
    slurm = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "5"}
    assert find_part(None, False, slurm) == (0, 1)
    assert find_part("1/8", False, {}) == (0, 8)
    assert find_part("8/8", False, {}) == (7, 8)
    assert find_part(None, True, slurm) == (4, 5)
    assert find_part(None, True, {**slurm, "SLURM_ARRAY_TASK_STEP": "2"}) == (2, 5)
    for wrong in ("0/8", "9/8", "1", "a/b", "1/0"):
        with pytest.raises(DataError, match="expected"):
            find_part(wrong, False, {})
    with pytest.raises(DataError, match="which has gaps"):
        find_part(None, True, {**slurm, "SLURM_ARRAY_TASK_COUNT": "2"})
    with pytest.raises(DataError, match="--array works only in a task"):
        find_part(None, True, {})


def test_what_is_wrong_is_one_sentence(here: Path) -> None:
    done = overland("data", "build", "lines", cwd=here, code=2)
    assert done.stderr.startswith("lines is text: specify the tokenizer for it with")
    assert done.stderr.count("\n") == 1
    path = here / "lines" / "001.jsonl"
    path.write_text(path.read_text() + '{"text": ""}\noops\n')
    done = overland(*BUILD, cwd=here, code=2)
    assert "001.jsonl:22: not a JSON object" in done.stderr
    page = overland(*BUILD, "--skip-bad", cwd=here).stdout
    assert "skipped     2\n" in page
    assert "documents   60\n" in page


def test_an_interrupted_build_says_how_to_go_on_and_does(here: Path) -> None:
    many_shards(here / "tokens.npy", 1000)
    process = start_overland("data", "build", "tokens.npy", "--processes", "2", cwd=here)
    wait_until(lambda: list(here.glob("data/*/shards/*/*.shard")), "a shard")
    code, output = interrupt(process)
    assert code == 130
    assert "shards are complete; run the same command again to build the rest" in output
    assert "Traceback" not in output
    (folder,) = (here / "data").iterdir()
    layout = read_layout(folder)
    assert 0 < len(layout.made()) < layout.num_shards


def test_a_corpus_is_not_built_into_its_source(here: Path) -> None:
    done = overland(*BUILD, "--out", "lines/tokens", cwd=here, code=2)
    assert "lines/tokens is inside the source lines" in done.stderr
    assert sorted(path.name for path in (here / "lines").iterdir()) == [
        f"{number:03d}.jsonl" for number in range(3)
    ]
    for out in (here, here / "lines-of-another", here / "data"):
        check_apart(here / "lines", out)
    with pytest.raises(DataError, match="is inside the source"):
        check_apart(here / "lines", here / "data" / ".." / "lines")


def test_a_run_on_a_corpus_without_eos_is_resumed(here: Path) -> None:
    done = overland(*BUILD, "--no-eos", "--json", cwd=here)
    settings = [
        "job.dump_folder=run",
        f"training.dataset_path={json.loads(done.stdout)['folder']}",
        "lr_scheduler.warmup_steps=1",
    ]
    for steps in (2, 4):
        overland("train", "quickstart", *TINY, *settings, f"training.steps={steps}", cwd=here)
    assert list(losses(here / "run" / "metrics.jsonl")) == [1, 2, 3, 4]
    assert "none repeated" in overland("prove", "data", "run", cwd=here).stdout
    done = overland("check", "quickstart", *TINY, *settings, "data.add_eos=true", cwd=here, code=2)
    assert "without BOS and without EOS" in done.stdout + done.stderr
