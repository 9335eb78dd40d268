"""Files, overrides and environment become one config."""

from __future__ import annotations

from pathlib import Path

import pytest

from overland.config.arguments import dry_run, log_ranks, ngpu
from overland.config.errors import ConfigError
from overland.config.load import load_config, recipe_names
from overland.config.schema import Job, JobConfig


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def writer(text: str, name: str = "run.toml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return writer


def config_of(source: str | None, *arguments: str, **env: str) -> JobConfig:
    return load_config(source, arguments, env).config


def test_toml_and_yaml_give_the_same_config(write) -> None:
    toml = write(
        '[model]\nflavor = "8B"\noverrides = { num_hidden_layers = 2, rope = { factor = 8.0 } }\n'
        "[training]\nsteps = 1_000\nmax_norm = 0.5\n[optimizer]\nlr = 3e-4\n"
        '[validation]\ndataset = ["a", "b"]\n[data.datasets]\nc4 = "/scratch/c4"\n'
    )
    yaml = write(
        "model:\n  flavor: 8B\n  overrides:\n    num_hidden_layers: 2\n    rope: {factor: 8.0}\n"
        "training:\n  steps: 1000\n  max_norm: 5e-1\noptimizer:\n  lr: 3e-4\n"
        "validation:\n  dataset: [a, b]\ndata:\n  datasets:\n    c4: /scratch/c4\n",
        "run.yaml",
    )
    assert config_of(toml) == config_of(yaml)
    assert config_of(toml).model.overrides == {"num_hidden_layers": 2, "rope": {"factor": 8.0}}
    assert config_of(toml).optimizer.lr == 3e-4


def test_an_empty_file_and_an_empty_section_are_the_defaults(write) -> None:
    defaults = JobConfig(job=Job(dump_folder="./outputs/run"))
    assert config_of(write("")) == defaults
    assert config_of(write("training:\noptimizer: {}\n", "run.yaml")) == defaults


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("training.steps=20", "training.steps", 20),
        ("training.steps=1e3", "training.steps", 1000),
        ("training.steps=1_000", "training.steps", 1000),
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("training.max_norm=2", "training.max_norm", 2),
        ("model.flavor=8B", "model.flavor", "8B"),
        ('model.flavor="8B"', "model.flavor", "8B"),
        ("job.dump_folder=123", "job.dump_folder", "123"),
        ("job.description=a=b", "job.description", "a=b"),
        ("compile.enable=True", "compile.enable", True),
        ("model.freeze=a.*,b.*", "model.freeze", ["a.*", "b.*"]),
        ('model.freeze=["a.*"]', "model.freeze", ["a.*"]),
        ('validation.dataset=["a", "b"]', "validation.dataset", ["a", "b"]),
        ("validation.dataset=a", "validation.dataset", "a"),
        ("training.dataset_path=none", "training.dataset_path", None),
        (
            "activation_checkpoint.selective_ac_option=2",
            "activation_checkpoint.selective_ac_option",
            "2",
        ),
        ("model.overrides.num_hidden_layers=2", "model.overrides", {"num_hidden_layers": 2}),
        ("model.overrides={hidden_size = 64}", "model.overrides", {"hidden_size": 64}),
        ("--training.steps=20", "training.steps", 20),
        ("--training.local-batch-size=2", "training.local_batch_size", 2),
        ("--checkpoint.no-enable", "checkpoint.enable", False),
        ("--checkpoint.no_enable", "checkpoint.enable", False),
        ("--compile.enable", "compile.enable", True),
        ("--training.compile", "compile.enable", True),
        ("training.batch_size=3", "training.local_batch_size", 3),
    ],
)
def test_an_override_takes_the_type_of_its_key(write, argument: str, key: str, value) -> None:
    section, name = key.split(".")
    config = config_of(write(""), argument)
    assert getattr(getattr(config, section), name) == value


def test_words_after_a_flag_are_its_value_only_if_they_can_be(write) -> None:
    words = [
        "--training.global_batch_size",
        "-1",
        "--compile.enable",
        "training.steps=7",
        "--metrics.enable_tensorboard",
        "false",
        "--model.flavor",
        "8B",
    ]
    config = config_of(write(""), *words)
    assert (config.training.global_batch_size, config.training.steps) == (-1, 7)
    assert config.compile.enable
    assert not config.metrics.enable_tensorboard
    assert config.model.flavor == "8B"


def test_names_that_users_choose_keep_their_dashes(write) -> None:
    file = write('[validation.sets.my-set]\npath = "a"\n')
    config = config_of(file, "validation.sets.my-set.freq=5", "data.sources.a-b.max-epochs=2",
                       "--training.seq-len=64")  # fmt: skip
    assert {name: one.freq for name, one in config.validation.sets.items()} == {"my-set": 5}
    assert config.data.sources["a-b"].max_epochs == 2
    assert config.training.seq_len == 64


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(write) -> None:
    file = write('[comm]\nbackend = "nccl"\n')
    assert config_of(file).comm.backend == "nccl"
    assert config_of(file, COMM_BACKEND="gloo").comm.backend == "gloo"
    assert config_of(file, "comm.backend=mpi", COMM_BACKEND="gloo").comm.backend == "mpi"


def test_a_table_on_the_command_line_replaces_the_one_in_the_file(write) -> None:
    file = write("[model]\noverrides = { hidden_size = 64, num_hidden_layers = 2 }\n")
    one = config_of(file, "model.overrides.hidden_size=32").model.overrides
    assert one == {"hidden_size": 32, "num_hidden_layers": 2}
    assert config_of(file, "model.overrides={}").model.overrides == {}


def test_an_override_keeps_the_order_of_sources(write) -> None:
    """Which decides what is read first, so a typed value would give other batches than the file."""
    path = write("[data.sources.a]\nweight = 1.0\n[data.sources.b]\nweight = 1.0\n")
    config = config_of(path, "data.sources.a.weight=2", "data.sources.c.path=.")
    assert [*config.data.sources] == ["a", "b", "c"]
    assert config.data.sources["a"].weight == 2


def test_the_file_is_named_by_argument_option_or_environment(write) -> None:
    file = write("[training]\nsteps = 7\n")
    assert config_of(file).training.steps == 7
    assert config_of(None, "--job.config_file", file).training.steps == 7
    assert config_of(None, f"--job.config_file={file}").training.steps == 7
    assert config_of(None, CONFIG_FILE=file).training.steps == 7
    with pytest.raises(ConfigError, match=r"is a second config file, after run\.toml"):
        config_of(file, "--job.config_file", "other.toml")
    with pytest.raises(ConfigError, match="no config given"):
        config_of(None)


def test_a_file_that_is_not_there_names_what_is_near(write) -> None:
    write("", "train.toml")
    with pytest.raises(ConfigError) as caught:
        config_of("trian.toml")
    assert str(caught.value) == (
        'command line: "trian.toml": no such file; did you mean train.toml?'
    )
    with pytest.raises(ConfigError) as caught:
        config_of(None, CONFIG_FILE="quikstart")
    assert str(caught.value) == (
        'environment CONFIG_FILE: "quikstart": no such file, and no recipe of that name (recipes: '
        f"{', '.join(recipe_names())}); did you mean quickstart?"
    )


def test_places_are_kept_for_later_messages(write) -> None:
    loaded = load_config(write("[training]\n\nsteps = 7\n"), ["training.seq_len=64"], {})
    assert loaded.where("training.steps") == "run.toml:3"
    assert loaded.where("training.seq_len") == "command line"
    assert loaded.where("optimizer.lr") == "run.toml"
    assert loaded.is_set("training.steps")
    assert not loaded.is_set("optimizer.lr")


def test_launcher_variables_are_checked() -> None:
    assert ngpu({}) is None
    assert ngpu({"NGPU": "4"}) == 4
    assert log_ranks({}) == [0]
    assert log_ranks({"LOG_RANK": "3, 0"}) == [0, 3]
    assert not dry_run({})
    assert dry_run({"DRY_RUN": "1"})
    with pytest.raises(ConfigError) as caught:
        ngpu({"NGPU": "four"})
    assert str(caught.value) == 'environment NGPU: "four": expected a positive whole number'
    with pytest.raises(ConfigError, match="environment LOG_RANK"):
        log_ranks({"LOG_RANK": "all"})
    with pytest.raises(ConfigError, match="environment DRY_RUN"):
        dry_run({"DRY_RUN": "perhaps"})


def test_the_config_of_a_run_means_its_own_folder_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "start" / "runs" / "mine"
    run.mkdir(parents=True)
    (tmp_path / "start" / "text.txt").write_text("some text")
    (run / "metrics.jsonl").touch()
    (run / "config.toml").write_text(
        '[job]\ndump_folder = "./runs/mine"\n[training]\ndataset_path = "text.txt"\n'
        '[checkpoint]\nfolder = "checkpoint"\n'
    )
    monkeypatch.chdir(tmp_path / "start")
    loaded = load_config("runs/mine/config.toml", env={})
    assert (loaded.config.job.dump_folder, loaded.notes) == ("./runs/mine", [])

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = load_config("../start/runs/mine/config.toml", env={})
    assert loaded.config.job.dump_folder == str(run)
    assert loaded.config.training.dataset_path == str(tmp_path / "start" / "text.txt")
    assert loaded.config.checkpoint.folder == "checkpoint"
    assert "resumes the run in ../start/runs/mine" in loaded.notes[0]
    other = ["job.dump_folder=new", "training.dataset_path=mine.txt"]
    config = load_config(str(run / "config.toml"), other, env={}).config
    assert (config.job.dump_folder, config.training.dataset_path) == ("new", "mine.txt")

    moved = run.rename(tmp_path / "moved")
    for named in ("./runs/mine", str(run)):
        text = f'[job]\ndump_folder = "{named}"\n[training]\ndataset_path = "text.txt"\n'
        (moved / "config.toml").write_text(text)
        loaded = load_config("../moved/config.toml", env={})
        assert loaded.config.job.dump_folder == str(moved)
        assert loaded.config.training.dataset_path == "text.txt"


def test_a_run_folder_stands_for_its_config(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    with pytest.raises(ConfigError, match=r"is a folder without a config\.toml; expected a config"):
        load_config(str(run), env={})
    (run / "config.toml").write_text("[training]\nsteps = 7\n")
    loaded = load_config(f"{run}/", env={})
    assert loaded.config.training.steps == 7
    assert loaded.where("training.steps") == f"{run}/config.toml:2"


def test_paths_of_a_run_are_rewritten_without_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link after the last `..` keeps its name, which tells the format; `..` of a link is the
    parent of what it leads to."""
    run = tmp_path / "start" / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (tmp_path / "far" / "inside").mkdir(parents=True)
    (tmp_path / "start" / "link").symlink_to(tmp_path / "far" / "inside")
    (tmp_path / "blob").write_text("a text")
    for folder in ("data", "far"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "notes.txt").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path / "data")
    for written, found in (
        ("../data/notes.txt", tmp_path / "data" / "notes.txt"),
        ("link/../notes.txt", tmp_path / "far" / "notes.txt"),
    ):
        (run / "config.toml").write_text(
            f'[job]\ndump_folder = "runs/mine"\n[training]\ndataset_path = "{written}"\n'
        )
        config = load_config(str(run / "config.toml"), env={}).config
        assert config.training.dataset_path == str(found)


def test_a_key_of_the_training_data_is_looked_for_in_training(write) -> None:
    with pytest.raises(ConfigError, match=r"unknown key; did you mean training\.column\?"):
        config_of(write('[data]\ncolumn = "body"\n'))


def test_a_switch_with_an_error_has_no_consequences(write) -> None:
    for key in ("rank", "rnak"):  # a wrong value, and a misspelled key
        words = [f"lora.{key}=-1", "lora.alpha=16", "lora.dropout=0.1"]
        with pytest.raises(ConfigError) as caught:
            config_of(write(""), *words)
        (problem,) = caught.value.problems
        assert problem.key == f"lora.{key}"


@pytest.mark.parametrize(("before", "today"), [("tokens", "sequences"), ("rows", "documents")])
def test_former_names_of_values_are_read_with_a_note(write, before: str, today: str) -> None:
    file = write(f'[data]\nmixture = "{before}"\n')
    for source, arguments, where in (
        (file, (), "run.toml:2"),
        (write("", "other.toml"), (f"data.mixture={before}",), "command line"),
    ):
        loaded = load_config(source, arguments, {})
        assert loaded.config.data.mixture == today
        assert loaded.notes == [f'{where}: data.mixture = "{before}" is now "{today}"']
    stored = JobConfig.model_validate({"data": {"mixture": before}})  # in a checkpoint
    assert stored.data.mixture == today
