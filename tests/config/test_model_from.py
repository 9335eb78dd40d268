"""`model.from` means architecture, tokenizer and weights; `model.config` only the architecture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overland.checks import check_config, require
from overland.config.errors import ConfigError
from overland.config.load import Loaded, load_config
from overland.config.write import to_toml

FILES = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in FILES:
        (tmp_path / "model" / name).write_text("{}")
    return Path("model")


def load(*arguments: str, text: str = "") -> Loaded:
    Path("run.toml").write_text(text)
    return load_config("run.toml", arguments, {"MODELS": "."})


def three_keys(loaded: Loaded) -> tuple[str | None, str | None, str | None]:
    model, checkpoint = loaded.config.model, loaded.config.checkpoint
    return model.config, model.hf_assets_path, checkpoint.initial_load_path


def test_one_key_takes_architecture_tokenizer_and_weights(model: Path) -> None:
    from_file = load(text='[model]\nfrom = "$MODELS/model"\n')
    assert three_keys(from_file) == ("model",) * 3
    assert three_keys(load("model.from=model")) == ("model",) * 3
    again = load(text=to_toml(from_file.config))  # a run folder's config.toml says it in full
    assert three_keys(again) == ("model",) * 3
    other = load("model.from=model", "model.hf_assets_path=tokenizer")
    assert three_keys(other) == ("model", "tokenizer", "model")


def test_a_run_folder_is_a_model_too(model: Path) -> None:
    (model / "tokenizer").mkdir()
    for name in ("config.toml", "model_config.json", "tokenizer/tokenizer.model"):
        (model / name).write_text("")
    expected = ("model/model_config.json", "model/tokenizer", "model")
    assert three_keys(load("model.from=model")) == expected


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("config.json", "has no config.json"),
        ("model-00001-of-00002.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something_is_refused(model: Path, missing: str, says: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=f'model.from = "model"?.*{says}'):
        load("model.from=model")


def test_a_model_of_an_unknown_kind_names_the_key_that_was_written(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "mamba"}')
    loaded = load(text='[model]\nfrom = "model"\n')
    with pytest.raises(ConfigError) as raised:
        require(loaded, 1)
    (problem,) = [one for one in raised.value.problems if "model_type" in one.message]
    assert str(problem).startswith('run.toml:2: model.from = "model": model/config.json: ')
    assert "docs/extending.md" in problem.message


def test_a_model_of_images_needs_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "config.json").write_text('{"model_type": "vit_mae", "image_size": 32}')
    assert three_keys(load("model.from=model")) == ("model", None, "model")


def test_a_checkpoint_of_a_run_is_told_apart_from_the_run(model: Path) -> None:
    (model / "COMMITTED").write_text("")
    with pytest.raises(ConfigError, match="is a single checkpoint of a run; name the run folder"):
        load("model.from=model")


def test_weights_of_torch_files_are_taken(model: Path) -> None:
    (model / FILES[1]).rename(model / "model_state_dict.pt")
    assert three_keys(load("model.from=model")) == ("model",) * 3


@pytest.mark.parametrize("key", ["model.config", "checkpoint.initial_load_path"])
def test_what_contradicts_it_is_refused(model: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="remove one of them"):
        load("model.from=model", f"{key}=other")


def test_a_folder_that_is_to_be_fetched_or_trained_is_named_once(model: Path) -> None:
    """By the checks, and not when it is loaded: `overland check` works before a download."""

    def missing(folder: str) -> str:
        (problem,) = check_config(load(f"model.from={folder}"), 1)
        assert problem.kind == "missing"
        return str(problem)

    assert re.search(
        r"model.from = .assets/x.: no .*fetch model NAME --to assets/x`", missing("assets/x")
    )
    assert missing("runs/quickstart").endswith("overland train quickstart` creates it")
    with pytest.raises(ConfigError, match="is a file; expected a folder"):
        load("model.from=model/config.json")


def test_weights_that_are_not_taken_are_named(model: Path) -> None:
    (note,) = [p for p in check_config(load("model.config=model"), 1) if "random weights" in str(p)]
    assert note.kind == "note"
    assert "to use its weights and the tokenizer too, set `model.from`" in str(note)
    assert not [
        p
        for p in check_config(load("model.from=model"), 1)
        if "random weights" in str(p)
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["model.from", "model.config"])
def test_a_flavor_that_has_no_effect_is_told(model: Path, key: str) -> None:
    def notes(*arguments: str) -> list[str]:
        return [str(p) for p in check_config(load(*arguments), 1) if p.key == "model.flavor"]

    (note,) = notes(f"{key}=model", "model.flavor=8B")
    assert 'model.flavor = "8B": has no effect' in note
    assert key in note
    assert not notes(f"{key}=model")
    assert not notes("model.flavor=8B")
