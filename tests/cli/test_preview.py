"""`overland data preview`: what the model sees, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from overland.apps.dataset import open_step
from overland.checks import devices_for
from overland.cli.data import render
from overland.config.load import load_config
from tests.cli.processes import TINY, environment, overland

WORDS = [*TINY, "training.steps=3", "validation.enable=false", "metrics.sample_prompt="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    overland("train", "quickstart", *WORDS, cwd=folder, NGPU="1")
    return folder


def test_a_config_and_its_run_show_the_same(folder: Path) -> None:
    words = ["--step", "2", "--row", "1", "--json"]
    size = "training.global_batch_size=2"
    planned = overland(
        "data", "preview", "quickstart", *WORDS[: len(TINY)], size, *words, cwd=folder
    )
    run = overland("data", "preview", "runs/quickstart", *words, cwd=folder)
    assert json.loads(planned.stdout) == json.loads(run.stdout)
    page = json.loads(run.stdout)
    assert (page["row"], len(page["tokens"])) == (1, 32)
    assert page["from"][0]["source"] == "stdlib"
    assert sum(piece["tokens"] for piece in page["from"]) in (32, 33)


def test_training_a_tokenizer_is_announced(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("a short text of a few words, read over and over\n" * 20)
    few = ["training.dataset_path=few.txt", "data.vocab_size=300", "data.folder=own"]
    words = ["data", "preview", "quickstart", *TINY, *few, "--json"]
    done = overland(*words, cwd=tmp_path)
    assert "training a tokenizer of " in done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "training a tokenizer" not in overland(*words, cwd=tmp_path).stderr


def test_the_text_is_that_of_the_document(folder: Path) -> None:
    shown = overland("data", "preview", "runs/quickstart", "--step", "100000", cwd=folder).stdout
    assert "step 100000, row 0 of 2: stdlib document " in shown
    page = json.loads(
        overland(
            "data", "preview", "runs/quickstart", "--step", "100000", "--json", cwd=folder
        ).stdout
    )
    assert "".join(page["pieces"]).strip().split()[0] in shown
    assert "32 tokens, 0 without a loss" in shown


def test_a_step_too_far_away_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("a short text of a few words, read over and over\n" * 20)
    few = [*TINY, "training.dataset_path=few.txt", "data.vocab_size=300"]
    beyond = "--step 10000000000000: expected an integer from 1 to 1,000,000,000,000"
    for step, why in ((10**12, "epochs into the data, too far"), (10**13, beyond)):
        words = ["data", "preview", "quickstart", *few, "--step", str(step)]
        assert why in overland(*words, cwd=tmp_path, code=2).stderr


def test_no_torch_is_imported(folder: Path) -> None:
    code = (
        "import sys; sys.argv = ['overland', 'data', 'preview', 'runs/quickstart', '--step', '9']\n"
        "from overland.cli.main import app\n"
        "app(standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_config_that_is_nowhere_is_one_line(tmp_path: Path) -> None:
    done = overland("data", "preview", "nowhere.toml", cwd=tmp_path, code=2)
    assert "nowhere.toml" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_row_that_is_not_there_is_one_line(folder: Path) -> None:
    done = overland("data", "preview", "runs/quickstart", "--row", "99", cwd=folder, code=2)
    assert done.stderr == "there is no row 99: the batch of step 1 has rows 0 to 1\n"


def test_a_batch_that_follows_the_devices_is_shown_for_as_many_as_ngpu_says(folder: Path) -> None:
    words = ["data", "preview", "quickstart", *TINY, "training.global_batch_size=-1", "--json"]
    done = overland(*words, cwd=folder, NGPU="3")
    assert json.loads(done.stdout)["rows"] == 6
    assert "shown for 3" in done.stderr


def test_a_conversation_shows_what_is_learned_with_and_without_colors() -> None:
    page = {
        "row": 0, "rows": 1, "tokens": [1, 2, 3, 4, 9],
        "pieces": ["<s>", "a\x1b[2J", "b", "c", "<p>"],
        "has_loss": [False, True, True, False, False], "weights": [0.0, 0.0, 1.0, 0.5, 0.0],
        "special": [True, False, False, False, True], "documents": [0] * 5,
        "from": [{"source": "talks", "document": 3, "start": 0, "tokens": 4}],
    }  # fmt: skip
    plain = render(page, 1, marks=True).plain.splitlines()
    assert plain[1] == "<s>a\\x1b[2J⟦bc⟧"
    said = "5 tokens, 2 learned (between ⟦ and ⟧), some with weight 0.5, 1 of padding"
    assert plain[2] == said
    colored = render(page, 1)
    assert colored.plain.splitlines()[1] == "<s>a\\x1b[2Jbc"
    assert colored.style == ""  # bold text would not look dim
    styles = {colored.plain[span.start : span.end]: str(span.style) for span in colored.spans}
    assert (styles["b"], styles["a\\x1b[2J"]) == ("cyan", "cyan dim")


def test_a_config_is_shown_for_the_devices_that_check_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured(config: object, size: int, *_: object) -> None:
        raise StopIteration(size)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setattr("overland.world.devices.num_local_ranks", lambda per_device=1: 3)
    monkeypatch.setattr("overland.apps.dataset.training_data", captured)
    settings = ["training.global_batch_size=-1", "training.local_batch_size=2"]
    with pytest.raises(StopIteration, match=r"^6$"):
        open_step("quickstart", settings, 1)
    assert devices_for(load_config("quickstart", settings))[0] == 3
