"""What `overland prove layout CONFIG` takes from a config, and what it refuses to prove."""

from __future__ import annotations

from pathlib import Path

import pytest

from overland.config.errors import ConfigError
from overland.models import registry
from overland.tools.proofs.layout import proof_job, settings_of
from overland.tools.proofs.layouts import parse

OWN = """\
from dataclasses import dataclass
from overland.models import DecoderConfig, register_model

@dataclass(frozen=True)
class MineConfig(DecoderConfig):
    pass

SIZES = dict(model_type="llama", vocab_size=96, hidden_size=32, intermediate_size=48,
             num_hidden_layers=2, num_attention_heads=4)
register_model("mine", flavors={"tiny": MineConfig(**SIZES)}, config_class=MineConfig,
               build=lambda config, attention: None)
"""


def test_the_kind_of_a_built_in_model_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nname = "qwen3"\nflavor = "0.6B"\n')
    settings = settings_of(str(tmp_path / "run.toml"))
    assert settings is not None
    assert settings["model"]["model_type"] == "qwen3"
    assert settings["model"]["tie_word_embeddings"] is True


def test_adapters_and_preferences_are_taken(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[lora]\nrank = 64\nalpha = 32.0\nrslora = true\n"
        '[sft]\nshape = "preference"\n[preference]\nloss = "ipo"\nbeta = 0.5\n'
    )
    settings = settings_of(str(tmp_path / "run.toml"))
    assert settings is not None
    job = proof_job(parse("tp2"), (), "float64", 2, tmp_path / "proof", settings)
    assert (job.lora.rank, job.lora.alpha, job.lora.rslora) == (4, 32.0, True)
    assert (job.preference.loss, job.preference.beta) == ("ipo", 0.5)
    assert (job.sft.shape, job.data.packing) == ("preference", "trunc")


def test_an_optimizer_of_ones_own_is_taken_with_its_module(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[job]\ncustom_import = "tests.optimizers.own"\n'
        '[optimizer]\nname = "Muon"\noptions = {momentum = 0.9}\n'
    )
    settings = settings_of(str(tmp_path / "run.toml"))
    assert settings is not None
    assert settings["job"] == {"custom_import": "tests.optimizers.own"}
    assert settings["optimizer"] == {"name": "Muon", "options": {"momentum": 0.9}}


def test_a_model_of_ones_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain decoder with its sizes would prove nothing about it."""
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_own.py").write_text(OWN)
    Path("run.toml").write_text(
        '[job]\ncustom_import = "my_own"\n[model]\nname = "mine"\nflavor = "tiny"\n'
    )
    with pytest.raises(ConfigError, match="custom models are not supported here"):
        settings_of("run.toml")
