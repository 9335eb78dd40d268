"""Opening a run: whatever is missing is reported in one sentence."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overland.apps.convert.formats import open_any
from overland.apps.evaluation.main import open_model
from overland.apps.evaluation.model import find_run
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.format import marker
from overland.config.errors import ConfigError
from overland.config.schema import JobConfig
from overland.config.write import write_config
from overland.errors import CheckpointError, DataError
from overland.models.build import build_undivided
from overland.world import World
from tests.jobs import run_job, tiny_job


def text_job(folder: Path) -> JobConfig:
    text = folder / "text"
    text.mkdir(parents=True)
    for number in range(20):
        (text / f"{number}.py").write_text(f"import os\nx = {number}\nprint(os, x)\n" * 20)
    return tiny_job(
        folder / "run",
        data={"folder": str(folder / "data"), "vocab_size": 300},
        training={"dataset_path": str(text), "dtype": "float32", "mixed_precision_param": "float32",
                  "mixed_precision_reduce": "float32", "steps": 2},
        checkpoint={"enable": True, "interval": 1},
    )  # fmt: skip


def train_it(world: World, config: JobConfig) -> None:
    run_job(world, config)


@pytest.fixture(scope="module")
def run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = text_job(tmp_path_factory.mktemp("evaluation"))
    ranks.run(2, train_it, config)
    return Path(config.job.dump_folder)


def test_a_run_opens_at_its_newest_checkpoint_and_at_any_other(run: Path) -> None:
    opened = open_model(run)
    newest, tokenizer = opened.model, opened.tokenizer
    last = open_model(run / "checkpoint" / "step_2").model
    first = open_model(run / "checkpoint" / "step_1").model
    assert opened.config is not None
    assert opened.config.training.steps == 2
    assert opened.context == 32
    assert opened.step == 2
    assert opened.path == run / "checkpoint" / "step_2"
    assert opened.end_ids == (tokenizer.eos_id,)
    assert tokenizer.decode(tokenizer.encode("import os")) == "import os"
    tokens_BS = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(newest(tokens_BS), last(tokens_BS))
        assert not torch.equal(newest(tokens_BS), first(tokens_BS))
        assert torch.equal(open_model(run, step=1).model(tokens_BS), first(tokens_BS))
    assert not newest.training


class Table(nn.Module):
    """A buffer that checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.full((3,), torch.nan), persistent=False)

    def init_buffers(self) -> None:
        self.angles.fill_(2.0)


def test_buffers_that_no_checkpoint_holds_have_their_values(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_table(*args: Any) -> nn.Module:
        model = build_undivided(*args)
        model.table = Table()
        return model

    monkeypatch.setattr("overland.apps.evaluation.model.build_undivided", with_table)
    assert open_model(run).model.table.angles.tolist() == [2, 2, 2]  # type: ignore[union-attr]


def test_a_model_of_images_is_said_to_have_no_text(tmp_path: Path) -> None:
    model = {"name": "vit_mae", "flavor": "debug", "overrides": {}}
    write_config(
        tiny_job(tmp_path, model=model, checkpoint={"enable": True}), tmp_path / "config.toml"
    )
    step = tmp_path / "checkpoint" / "step_1"
    step.mkdir(parents=True)
    (step / "COMMITTED").write_bytes(marker(b"", {"step": 1}))
    with pytest.raises(CheckpointError, match="is a model of arrays, not of text"):
        open_model(tmp_path)


def test_a_relative_path_inside_the_run_is_found(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert find_run(Path()) == (Path(), None)
    folder, step = find_run(Path("checkpoint/step_1"))
    assert (folder.resolve(), step) == (run.resolve(), Path("checkpoint/step_1"))


@pytest.mark.parametrize("name", ["nothing_there", "checkpoint", "checkpoint/step_99", "logs"])
def test_a_folder_that_is_no_checkpoint_is_named(run: Path, name: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"{name} (does not exist|is not a checkpoint in a known)"
    ):
        open_model(run / name)


def test_the_link_to_the_latest_checkpoint_opens(run: Path) -> None:
    opened = open_model(run / "checkpoint" / "latest")
    assert opened.step == 2
    assert opened.path.name == "step_2"  # which results are kept by


def test_a_link_from_elsewhere_opens_with_what_its_run_knows(run: Path, tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(run / "checkpoint" / "step_1")
    assert find_run(tmp_path / "best") == (run, run / "checkpoint" / "step_1")
    assert open_model(tmp_path / "best").config is not None


def test_a_step_that_is_not_there_is_named_with_those_that_are(run: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; it has 1 and 2"):
        open_model(run, step=7)
    with pytest.raises(CheckpointError, match="is a single checkpoint: omit --step"):
        open_model(run / "checkpoint" / "step_1", step=1)


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    write_config(tiny_job(tmp_path), tmp_path / "config.toml")
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no checkpoint yet"):
        open_model(tmp_path)


def test_an_earlier_runs_weights_are_not_the_result_of_one_that_saved_nothing(run: Path) -> None:
    kept = (run / "config.toml").read_text()
    off = re.sub(r"(?m)^(\[checkpoint\][^\[]*?^enable = )true", r"\1false", kept)
    assert off != kept
    try:
        (run / "config.toml").write_text(off)
        for open_it in (open_model, open_any):
            with pytest.raises(CheckpointError, match="saved nothing"):
                open_it(run)
        assert open_model(run / "checkpoint" / "step_1").path.name == "step_1"
    finally:
        (run / "config.toml").write_text(kept)


def test_a_run_on_random_tokens_has_no_tokenizer_and_says_so(tmp_path: Path) -> None:
    write_config(tiny_job(tmp_path, checkpoint={"enable": True}), tmp_path / "config.toml")
    step = tmp_path / "checkpoint" / "step_1"
    step.mkdir(parents=True)
    (step / "COMMITTED").write_bytes(marker(b"", {"step": 1}))
    with pytest.raises(DataError, match="has no tokenizer, as after training on token ids: give"):
        open_model(tmp_path, needs_tokenizer=True)


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    config = tiny_job(tmp_path, job={"dump_folder": str(tmp_path), "custom_import": "not_there"})
    write_config(config, tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r'job.custom_import = "not_there": no such module'):
        open_model(tmp_path)
