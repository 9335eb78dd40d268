"""Checks beyond the schema."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overland.checks import check_config, load_checked, require
from overland.checks.hyperparameters import check_units
from overland.cli.main import app
from overland.config.derived import DegreeError, resolve_degrees
from overland.config.errors import ConfigError
from overland.config.load import load_config, recipe_names
from overland.config.write import write_config

WORLD = {
    "llama3_8b": 4,
    "llama3_8b_frontier": 512,
    "llama3_8b_frontier_n640": 5120,
    "llama3_8b_frontier_benchmark": 64,
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")


def problems(*arguments: str, world_size: int | None = 8) -> list[str]:
    return [str(p) for p in check_config(load_config("run.toml", arguments, {}), world_size)]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_but_for_what_is_to_be_fetched(name: str) -> None:
    loaded, waived = load_checked(name, (), {}, WORLD.get(name, 2), waive={"missing"})
    assert loaded.notes == []
    assert {problem.kind for problem in waived} <= {"missing"}
    assert ("missing" in {problem.kind for problem in waived}) == (name in NEED_ASSETS)


NEED_ASSETS = {
    "llama3_8b", "llama3_8b_frontier", "qwen3_0.6b", "sft_lora_llama3_8b", "sft_full", "qlora",
    "dpo", "sft_quickstart", "llama3_8b_frontier_n640", "llama3_8b_frontier_benchmark",
}  # fmt: skip


def test_the_values_of_the_documents_are_in_their_recipes() -> None:
    eight = load_config("llama3_8b", env={}).config
    assert eight.model.hf_assets_path == "./assets/hf/Llama-3.1-8B"
    training = eight.training
    assert (training.seq_len, training.local_batch_size, training.steps) == (512, 2, 200)
    assert (training.dataset, training.max_norm, training.dtype) == ("c4", 1.0, "float32")
    assert (eight.optimizer.name, eight.optimizer.lr) == ("AdamW", 3e-4)
    assert eight.lr_scheduler.warmup_steps == 50
    frontier = load_config("llama3_8b_frontier", env={}).config
    degrees = resolve_degrees(frontier.parallelism, 64 * 8)
    assert (degrees.dp_replicate, degrees.dp_shard, degrees.tp) == (2, 32, 8)
    tokens = frontier.training.local_batch_size * degrees.dp * frontier.training.seq_len
    assert round(tokens / 1e6) == 11
    assert (frontier.optimizer.lr, frontier.training.steps) == (3e-5, 500_000)


def test_the_values_of_the_walkthrough_are_in_its_recipe() -> None:
    adapters = load_config("sft_lora_llama3_8b", env={}).config
    lora, training = adapters.lora, adapters.training
    assert (lora.rank, lora.alpha, lora.dropout) == (8, 8.0, 0.1)
    assert lora.targets == ["q_proj", "v_proj"]
    assert (training.epochs, training.global_batch_size, training.max_norm) == (1.0, 16, 0.3)
    assert (adapters.optimizer.lr, adapters.optimizer.weight_decay) == (4e-5, 0.001)
    assert (adapters.lr_scheduler.warmup_ratio, adapters.lr_scheduler.decay_type) == (
        0.03,
        "constant",
    )
    assert adapters.checkpoint.interval == 50
    full = load_config("sft_full", env={}).config
    assert full.lora.rank == 0
    assert (full.sft, full.training, full.data) == (adapters.sft, adapters.training, adapters.data)


def test_the_defaults_have_no_problems() -> None:
    assert problems() == []
    assert problems(world_size=None) == []


DEGREES = ["data_parallel_shard_degree", "tensor_parallel_degree", "pipeline_parallel_degree",
           "data_parallel_replicate_degree"]  # fmt: skip


@pytest.mark.parametrize("stage", [None, "zero0", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"])
def test_the_check_of_degrees_agrees_with_the_mesh(stage: str | None) -> None:
    """No layout passes the check and fails in the mesh; each suggestion is one that fits."""
    for sizes in [(-1, 1, 1, 1), (-1, 2, 1, 2), (2, 2, 2, 1), (3, 1, 1, 1), (-1, 3, 1, 1),
                  (4, 1, 1, 1), (1, 1, 1, 8), (-1, 1, 1, 3), (1, 1, 16, 1)]:  # fmt: skip
        words = [f"parallelism.{name}={n}" for name, n in zip(DEGREES, sizes, strict=True)]
        words += [f"parallelism.sharding_stage={stage}"] if stage else []
        loaded = load_config("run.toml", words, {})
        found = check_config(loaded, 8)
        if not found:
            assert resolve_degrees(loaded.config.parallelism, 8, 8).world_size == 8
        elif stage is None:
            with pytest.raises(DegreeError):
                assert resolve_degrees(loaded.config.parallelism, 8, 8).world_size == 8
        for problem in found:
            _, _, way_out = problem.message.partition("; parallelism.")
            if way_out.endswith(" would fit"):
                name, _, value = way_out.removesuffix(" would fit").partition(" = ")
                mended = load_config("run.toml", [*words, f"parallelism.{name}={value}"], {})
                assert not [p for p in check_config(mended, 8) if "multiply" in p.message]


def test_an_unknown_compiler_is_told_which_this_torch_has() -> None:
    (found,) = check_config(load_config("run.toml", ["compile.backend=inducter"], {}), 8)
    assert (found.kind, found.key) == ("invalid", "compile.backend")
    assert "; expected one of " in found.message


def test_a_validation_set_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[validation]\nenable = true\n[validation.sets.""]\ndataset = "stdlib_heldout"\n'
    )
    (problem,) = check_config(load_config(str(tmp_path / "run.toml"), (), {}), 8)
    assert "expected a name without /" in str(problem)


def test_the_suggested_local_batch_fits() -> None:
    """A global batch of 256, a local one of 32, and 32 devices: as one of the documents has it."""
    words = ["training.global_batch_size=256", "training.local_batch_size=32"]
    (line,) = problems(*words, world_size=32)
    assert (
        "training.local_batch_size = 8 keeps 256, or set training.global_batch_size = 1024" in line
    )
    assert problems(words[0], "training.local_batch_size=8", world_size=32) == []


@pytest.mark.parametrize(
    ("warmup_steps", "says"),
    [(500, "the warm-up is longer than the schedule (training.steps = 100), so the learning rate "
     "does not reach optimizer.lr"),
     (20, "20 steps of warm-up and 90 of decay are more than training.steps = 100"),
     (None, "the warm-up, the default, is longer than the schedule (training.steps = 100), so the "
      "learning rate does not reach optimizer.lr")],
)  # fmt: skip
def test_a_schedule_longer_than_the_run_is_a_note(warmup_steps: int | None, says: str) -> None:
    given = f"warmup_steps = {warmup_steps}\n" if warmup_steps else ""
    Path("run.toml").write_text(f"[lr_scheduler]\n{given}decay_ratio = 0.9\n")
    (note,) = require(load_config("run.toml", ["training.steps=100"], {}), 2)
    assert (note.kind, note.message) == ("note", says)


def test_a_long_sequence_is_a_note() -> None:
    (note,) = require(load_config("run.toml", ["training.seq_len=10_000_000"], {}), 2)
    assert note.kind == "note"
    assert "longer than the" in note.message


def test_named_datasets_are_found_in_folders_and_registries(monkeypatch) -> None:
    assert len(problems("training.dataset=books")) == 1
    Path("data/books").mkdir(parents=True)
    assert problems("training.dataset=books") == []
    Path("elsewhere").mkdir()
    assert problems("training.dataset=films", "data.datasets.films=elsewhere") == []


def test_a_custom_module_is_imported_before_its_names_are_looked_up(monkeypatch) -> None:
    from overland.data import registry

    monkeypatch.setattr(registry, "_sources", dict(registry._sources))
    Path("my_sources_for_checks.py").write_text(
        "from overland.data.registry import register_source\n"
        "register_source('mine', lambda: None)\n"
    )
    words = ["job.custom_import=my_sources_for_checks", "training.dataset=mine"]
    assert problems(*words) == []


def test_a_custom_module_that_fails_says_how() -> None:
    Path("broken_module_for_checks.py").write_text("import no_such_thing_at_all\n")
    (line,) = problems("job.custom_import=broken_module_for_checks")
    assert "cannot be imported: it needs the module no_such_thing_at_all" in line
    Path("raising_module_for_checks.py").write_text("raise ValueError('no luck')\n")
    (line,) = problems("job.custom_import=raising_module_for_checks")
    assert "cannot be imported: ValueError: no luck" in line


def test_kinds_can_be_waived_and_are_then_reported() -> None:
    Path("run.toml").write_text('[training]\ndataset = "c4"\n')
    loaded = load_config("run.toml", (), {})
    with pytest.raises(ConfigError):
        require(loaded, 2)
    (waived,) = require(loaded, 2, waive={"missing"})
    assert waived.kind == "missing"


def test_loading_a_config_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from overland.checks import load_checked; "
        "load_checked('quickstart', (), {}, 2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_weights_and_biases_without_its_package_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr("overland.checks.machine.find_spec", lambda name: None)
    (problem,) = check_config(load_config("quickstart", ["metrics.enable_wandb=true"], {}), 2)
    assert "pip install 'overland[wandb]'" in str(problem)


def test_a_pipeline_has_the_micro_batches_of_a_whole_step() -> None:
    """Also where it is not known for how many devices the check is."""
    words = ["parallelism.pipeline_parallel_degree=2", "training.local_batch_size=1"]
    for world_size in (None, 2):
        loaded, _ = load_checked(
            "llama3_debug", [*words, "training.global_batch_size=4"], {}, world_size
        )
        assert loaded.config.training.global_batch_size == 4
        with pytest.raises(ConfigError, match="1 micro-batches; 1F1B needs at least 2"):
            load_checked("llama3_debug", [*words, "training.global_batch_size=1"], {}, world_size)


def test_a_schedule_that_hangs_on_an_older_torch_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("overland.checks.machine.version", lambda name: "2.11.0+cu130")
    words = ["parallelism.pipeline_parallel_degree=2", "training.local_batch_size=8"]
    words += ["parallelism.pipeline_parallel_schedule=DualPipeV"]
    (problem,) = check_config(load_config("llama3_debug", words, {}), 2)
    assert "needs torch 2.13 or newer to split the backward pass (installed: 2.11.0+cu130)" in str(
        problem
    )


@pytest.mark.parametrize(
    ("capability", "hip", "says"),
    [((8, 0), None, "Ada, Hopper or newer"), ((9, 4), "7.2", "AMD"), ((9, 0), None, "")],
)
def test_products_in_8_bits_need_a_gpu_that_has_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, says: str
) -> None:
    import torch

    assert problems("training.float8=tensorwise") == []  # on a CPU they are emulated
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "hip", hip)
    found = problems("training.float8=tensorwise")
    assert len(found) == bool(says)
    assert not says or says in found[0]
    assert problems("training.float8=off") == []


def test_a_choice_of_algorithms_written_as_a_value_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, is_noted in (("TREE or RING", True), ("Tree,Ring", False), ("^NVLS", False)):
        monkeypatch.setenv("NCCL_ALGO", value)
        assert any("NCCL_ALGO" in one for one in problems()) == is_noted


def test_either_name_of_a_tied_matrix_freezes_it() -> None:
    assert not problems('model.freeze=["lm_head.*"]', "model.overrides.tie_word_embeddings=true")


@pytest.mark.parametrize(
    ("axis", "degree", "length", "says"),
    [
        ("context", 2, 62, "must be a multiple of 4; the nearest is 64"),
        ("context", 4, 1, "must be a multiple of 8; the nearest is 8"),
        ("tensor", 2, 31, "must be a multiple of 2; the nearest is 32"),
        ("pipeline", 2, 32, "rows of one length only; remove it, or set it to 64"),
    ],
)
def test_a_validation_length_that_the_layout_cannot_cut_is_refused(
    axis: str, degree: int, length: int, says: str
) -> None:
    layout = ["training.seq_len=64", f"parallelism.{axis}_parallel_degree={degree}"]
    held_out = ["validation.enable=true", f"validation.seq_len={length}"]
    (found,) = [text for text in problems(*layout, *held_out) if "seq_len" in text]
    assert says in found
    (unused,) = [text for text in problems(*layout, held_out[1]) if "seq_len" in text]
    assert "has no effect" in unused


def test_a_pipeline_says_that_it_validates_with_its_own_number_of_rows() -> None:
    layout = ["training.seq_len=64", "parallelism.pipeline_parallel_degree=2"]
    (found,) = [
        text
        for text in problems(*layout, "validation.enable=true", "validation.local_batch_size=3")
        if "validation.local_batch_size" in text
    ]
    assert "has no effect: a pipeline" in found


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optimizer.lr=inf", "expected a number, 0 or more"),
        ("optimizer.eps=0", "expected a positive number"),
        ("optimizer.weight_decay=nan", "expected a number, 0 or more"),
        ("debug.seed=9223372036854775808", "expected a whole number from 0 to below"),
        ("comm.train_timeout_seconds=99999999999", "whole number, at most 31,536,000"),
    ],
)
def test_numbers_that_nothing_can_compute_with_are_refused(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        problems(word)


def test_overrides_of_weights_that_are_loaded_are_a_note(tmp_path: Path) -> None:
    from overland.models.flavors import FLAVORS

    config = FLAVORS["llama3"]["debug"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    words = [f"model.config={tmp_path}", f"checkpoint.initial_load_path={tmp_path}"]
    assert not any("are loaded into" in line for line in problems(*words))
    said = "\n".join(problems(*words, 'model.overrides={norm_type = "layernorm"}'))
    assert "a different norm_type (layernorm, not rmsnorm) than they were trained with" in said


def test_a_world_beyond_any_cluster_is_checked_without_a_step() -> None:
    done = CliRunner().invoke(app, ["check", "run.toml", "--world-size", "1000000"])
    assert done.exit_code == 0, done.output
    assert "skipped the fake step, which supports" in done.stderr
    assert "devices    1,000,000\n" in done.stdout


def test_an_override_is_blamed_on_the_place_it_was_set_at() -> None:
    Path("run.toml").write_text("[model.overrides]\nhidden_size = 64\n")
    (found,) = problems("model.overrides.head_dim=7")
    assert found.startswith("command line: model.overrides.head_dim = 7: ")


def test_a_model_that_hugging_face_cannot_name_is_not_exported_at_the_end() -> None:
    settings = ["model.overrides.norm_type=layernorm", "checkpoint.last_save_in_hf=true"]
    (found,) = problems(*settings)
    assert "no llama with norm_type = 'layernorm'" in found
    assert not problems(settings[0])


def test_a_model_that_is_still_to_be_fetched_hides_nothing() -> None:
    Path("page.txt").write_text("text")
    words = ["check", "run.toml", "model.config=nowhere", "training.seq_len=10_000_000"]
    done = CliRunner().invoke(app, [*words, "training.dataset_path=page.txt"])
    assert done.exit_code == 0, done.output
    assert 'model.config = "nowhere": no such file or folder' in done.stdout
    assert "the model itself was not checked" in done.stdout
    done = CliRunner().invoke(app, [*words, "training.dataset_path=run.toml"])
    assert done.exit_code == 2
    assert 'model.config = "nowhere": no such file or folder' in done.stderr
    assert "run.toml has an unknown format" in done.stderr
    done = CliRunner().invoke(app, [*words, "parallelism.tensor_parallel_degree=3"])
    assert done.exit_code == 2
    assert 'model.config = "nowhere": no such file or folder' in done.stderr
    assert "training.seq_len = 10000000: with tensor_parallel_degree = 3" in done.stderr


def test_check_refuses_a_path_that_train_refuses_and_still_describes_the_run() -> None:
    words = ["check", "run.toml", "--no-step", "training.dataset_path=nowhere/x.jsonl"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert 'training.dataset_path = "nowhere/x.jsonl": no such file or folder\n' in done.stdout
    assert done.stdout.startswith("model ")
    end = "The rest of the config is valid; `overland train` needs these first.\n"
    assert done.stdout.endswith(end)
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 2
    assert len(json.loads(done.stdout)["to_fetch"]) == 1
    done = CliRunner().invoke(app, ["check", "run.toml", "--no-step", "training.dataset=c4"])
    assert done.exit_code == 0, done.output  # a command that the message names fetches it
    assert done.stdout.endswith(end)


def test_comments_of_a_config_name_the_command_that_fetches_a_path() -> None:
    Path("mine.toml").write_text(
        "[data]\nbad_documents = 'skip'\n"
        "# overland fetch dataset me/mine --subset one --to data/mine\n"
        "# Fetch it with `overland fetch dataset me/mine --subset two --to ./data/mine`, or not.\n"
        "[data.sources.mine]\npath = 'data/mine'\nsubset = 'two'\n"
        "# overland fetch dataset me/unbalanced's --to data/other\n"
        "[data.sources.other]\npath = 'data/other'\n"
    )
    done = CliRunner().invoke(app, ["check", "mine.toml", "--no-step"])
    assert done.exit_code == 2, done.output
    fetch = "overland fetch dataset me/mine --subset two --to ./data/mine` fetches it\n"
    assert fetch in done.stdout
    assert 'data.sources.other.path = "data/other": no such file or folder\n' in done.stdout
    done = CliRunner().invoke(app, ["check", "mine.toml", "--no-step", "data.sources.other.path=x"])
    assert 'data.sources.other.path = "x": no such file or folder\n' in done.stdout


@pytest.mark.parametrize("recipe", recipe_names())
def test_whatever_a_recipe_lacks_is_listed_with_the_way_to_get_it(recipe: str) -> None:
    done = CliRunner().invoke(app, ["check", recipe, "--no-step"])
    assert done.exit_code == 0, done.output
    lines = [one for one in done.stdout.splitlines() if one.startswith("  recipe ")]
    ways = ("` fetches it", "` creates it", "the recipe's comments say how to get it")
    assert all(any(way in line for way in ways) for line in lines), done.stdout
    assert "OWNER/NAME" not in done.stdout
    assert " NAME" not in done.stdout


def test_check_describes_what_train_would_do_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from overland.world import devices

    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setattr(devices, "num_local_ranks", lambda per_device=1: 3)
    sizes = ["training.local_batch_size=2", "training.seq_len=32", "training.steps=10"]
    done = CliRunner().invoke(app, ["check", "run.toml", *sizes])
    assert done.exit_code == 0, done.output
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if "  " in line)
    assert lines["batch"] == "6 × 32 = 192 tokens per step; 10 steps (1,920 tokens)"
    assert lines["devices"].startswith("3 × ")
    assert "as `overland train` would use here; --world-size checks" in lines["devices"]
    assert re.match(r"[\d.]+ MiB per rank: parameters [\d.]+ MiB, gradients", lines["memory"])
    assert "all-gathers" in lines["communication"]
    assert "MFLOP per token" in lines["compute"]
    monkeypatch.setenv("NGPU", "4")
    done = CliRunner().invoke(app, ["check", "run.toml", *sizes, "--no-step"])
    assert "\ndevices    4\n" in done.stdout


def test_check_describes_a_config_for_another_machine_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from overland.world import devices

    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setattr(devices, "num_local_ranks", lambda per_device=1: 3)
    words = ["check", "run.toml", "--no-step", "parallelism.tensor_parallel_degree=2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "`overland train` would refuse this config on the 3 devices of this" in done.stderr
    assert "checked for 2 instead (--world-size)" in done.stderr
    assert "\ndevices    2\n" in done.stdout


def test_a_model_whose_weights_are_not_taken_is_still_looked_at() -> None:
    from overland.models.flavors import FLAVORS

    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(FLAVORS["llama3"]["debug"].to_hf()))
    Path("model/model.safetensors").touch()
    done = CliRunner().invoke(app, ["check", "run.toml", "model.config=model", "--no-step"])
    assert done.exit_code == 0, done.output
    assert "only the architecture of this folder is used" in done.stderr
    assert "The config is valid." in done.stdout


def test_the_command_line_counts_in_another_unit_than_the_file() -> None:
    Path("run.toml").write_text("[training]\nsteps = 20\n[lr_scheduler]\nwarmup_ratio = 0.1\n")
    assert problems("training.epochs=2", "lr_scheduler.warmup_steps=5") == []
    Path("run.toml").write_text("[training]\nsteps = 20\nepochs = 2\n")
    assert len(problems()) == 1


def test_epochs_and_a_ratio_are_written_without_the_keys_that_they_replace() -> None:
    loaded = load_config("run.toml", ["training.epochs=2.5", "lr_scheduler.warmup_ratio=0.1"], {})
    write_config(loaded.config, Path("again.toml"), full=True)
    again = load_config("again.toml", (), {})
    assert again.config == loaded.config
    assert list(check_config(again, 8)) == []


def test_a_backend_that_no_build_has_is_refused_by_check_too() -> None:
    """Another machine may have nccl; a torch with MPI is built by hand."""
    for backend, kind in (("mpi", "invalid"), ("nccl", "machine")):
        loaded = load_config("run.toml", (), {"COMM_BACKEND": backend})
        (problem,) = [p for p in check_config(loaded, 8) if p.key == "comm.backend"]
        assert problem.kind == kind


def test_a_slow_check_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from overland.cli import check

    with check.said_if_slow("a quick one"):
        pass
    assert capsys.readouterr().err == ""
    said = threading.Event()
    monkeypatch.setattr(check, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr("builtins.print", lambda *words, **_: said.set())
    with check.said_if_slow("a slow one"):
        assert said.wait(60)


def test_a_path_beside_the_default_dataset_is_a_note(tmp_path: Path) -> None:
    """Older runs wrote both into their config.toml."""
    for name, kind in (("stdlib", "note"), ("shapes", "invalid")):
        text = f'[training]\ndataset = "{name}"\ndataset_path = "x.jsonl"\n'
        (tmp_path / "run.toml").write_text(text)
        loaded = load_config(str(tmp_path / "run.toml"))
        (problem,) = check_units(loaded)
        assert (problem.key, problem.kind) == ("training.dataset_path", kind)
