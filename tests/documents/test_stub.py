"""The page of the FSDP training stub: every line of it runs, with its YAML unchanged.

What is laid over the YAML makes the model and the images small, and stands on the command line.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from overland.apps.check.rehearsal import known_steps
from overland.apps.ledger import read_ledger
from overland.config.load import load_config
from overland.models import build_model, resolve_config
from overland.run_folder import LEDGER
from tests.cli.processes import (
    ROOT,
    environment,
    interrupt,
    losses,
    overland,
    read_metrics,
    start_overland,
    wait_for_step,
)
from tests.cluster.packages import need
from tests.cluster.slurm import Slurm
from tests.waiting import LIMIT_SECONDS

CONFIG = "test_config_training.yaml"
TEXT = (Path(__file__).parent / "stub" / CONFIG).read_text()
SCRIPT = [sys.executable, "train_stub.py", CONFIG]
COMMAND = [sys.executable, "-m", "overland", "train", CONFIG]
RUN = Path("experiments/chkpts/dummy-0.1")
FILES = ("model_state_dict.pt", "optim_state_dict.pt", "lr_state_dict.pt", "iter_state_dict.pt")
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 64, "image_size": 32, "patch_size": 8,
}  # fmt: skip
WORDS = [
    "comm.backend=gloo",
    *(f"model.overrides.{key}={value}" for key, value in SMALL.items()),
    "images.shape=[1, 30, 28]",
    "images.pad=[32, 32]",
    "images.count=20",
    "images.segment_size=6",
    "training.global_batch_size=4",
    "training.local_batch_size=1",
    "training.mixed_precision_param=float32",
    "training.epochs=2",
    "checkpoint.interval=4",
    "checkpoint.preempt_interval=3",
    "validation.freq=4",
    "validation.steps=2",
    "metrics.log_freq=1",
]


def test_a_partial_hf_config_takes_the_rest_from_transformers(place: Path) -> None:
    """As the document writes it, with three keys and "other architecture parameters"."""
    transformers = pytest.importorskip("transformers")
    given = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16}
    yaml_file = {**yaml.safe_load(TEXT), "model": {"hf_config": given}}
    del yaml_file["dataset"]["num_channels"]
    (place / CONFIG).write_text(yaml.safe_dump(yaml_file))
    loaded = load_config(str(place / CONFIG), resolve=False)
    model = loaded.config.model
    ours = resolve_config(model.name, model.flavor, None, model.overrides).to_hf()
    theirs = transformers.ViTMAEConfig(**given).to_dict()
    assert {key: theirs[key] for key in ours if key != "architectures"} == {
        key: value for key, value in ours.items() if key != "architectures"
    }
    (said,) = (note for note in loaded.notes_at_start() if "intermediate_size" in note)
    assert "model.flavor" in said


def test_one_note_at_the_start_stands_for_all_about_keys(place: Path) -> None:
    loaded = load_config(str(place / CONFIG), resolve=False)
    (line,) = loaded.notes_at_start()
    assert "overland check" in line
    assert len(loaded.notes) > 20


@pytest.mark.long
def test_cpu_only_keeps_ranks_off_gpus(place: Path) -> None:
    """On a machine that says it has GPUs; a rank that used one would fail here."""
    (place / CONFIG).write_text(TEXT.replace("cpu_only: False", "cpu_only: True"))
    code = (
        "import sys, torch; torch.cuda.is_available = lambda: True; import overland; "
        "overland.train(overland.load_config(sys.argv[1], sys.argv[2:]))"
    )
    words = [*WORDS, "training.epochs=0.2"]
    done = subprocess.run(
        [sys.executable, "-c", code, CONFIG, *words],
        cwd=place, env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_metrics(place / RUN / "metrics.jsonl")[-1]["step"] == 1


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what `overland init --from stub` puts there."""
    for file in (ROOT / "overland" / "scripts" / "stub").iterdir():
        shutil.copy(file, tmp_path)
    assert (tmp_path / CONFIG).read_text() == TEXT
    return tmp_path


def train(place: Path, *words: str, ranks: int = 1, **env: str) -> dict[int, float]:
    overland("train", CONFIG, *WORDS, *words, cwd=place, NGPU=str(ranks), **env)
    return losses(place / RUN / "metrics.jsonl")


def run(words: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def links(place: Path) -> dict[str, Path]:
    """Names by time, by the checkpoint that they lead to."""
    found = place.glob(f"{RUN}.*")
    return {os.readlink(link).rpartition("/")[2]: link for link in found if link.is_symlink()}


def iter_state(checkpoint: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(checkpoint / "iter_state_dict.pt", weights_only=True)
    return loaded


def close(found: dict[int, float], expected: dict[int, float]) -> bool:
    pairs = [(found[step], expected[step]) for step in expected]
    return found.keys() == expected.keys() and all(abs(a - b) < 2e-5 * abs(b) for a, b in pairs)


def test_the_yaml_as_it_is_passes_check_and_every_key_is_noted(place: Path) -> None:
    done = overland("check", CONFIG, "--no-step", cwd=place, COMM_BACKEND="gloo", NGPU="10")
    text = done.stdout + done.stderr
    assert "The config is valid." in text
    assert "steps" in text
    for path in ("train", "validate"):
        assert f"safetensor_dataset.{path}.csv does not exist" in text
    for section, keys in yaml.safe_load(TEXT).items():
        for key in keys if section not in ("model", "lr_scheduler") else ():
            assert key in text, f"{section}.{key}"


def test_the_yaml_as_it_is_becomes_a_job(place: Path) -> None:
    words = ["--site", "frontier", "--nodes", "2", "--account", "abc123", "--dry-run"]
    text = overland("submit", CONFIG, *words, cwd=place).stdout
    assert "#SBATCH --nodes=2" in text
    assert "dummy-0.1" in text


def test_a_single_process_trains_saves_and_validates(place: Path) -> None:
    output = run([*SCRIPT, *WORDS], place)
    assert "training.epochs = 2 of safetensor_dataset.train.csv is 10 steps" in output
    assert "so the model is trained on 20 random images of 1 × 30 × 28" in output
    records = read_metrics(place / RUN / "metrics.jsonl")
    validated = {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}
    assert list(validated) == [4, 8, 10]
    assert all(record["mfu"] > 0 for record in records if "loss" in record)  # peak_flops_per_sec
    named = links(place)
    steps = [3, 4, 6, 8, 9, 10]
    assert sorted(named) == sorted(
        f"step_{step}" + ("" if step in (4, 8, 10) else ".preempt") for step in steps
    )
    for step, link in named.items():
        assert {file.name for file in link.iterdir()} >= {*FILES}
        assert link.name.endswith(".preempt") == step.endswith(".preempt")
        for file in FILES:
            torch.load(link / file, weights_only=True)
    # 4 × 8 = 32 images: the second epoch of 20 is at its 12th, in the third segment of six.
    state = iter_state(named["step_8"])
    assert (state["epoch"], state["seg"]) == (1, 2)
    assert (state["start_idx"], state["end_idx"]) == (12, 18)
    assert state["loss_min"] == pytest.approx(min(validated[4], validated[8]))
    assert iter_state(named["step_3.preempt"])["loss_min"] == float("inf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank to its end."""
    place = tmp_path_factory.mktemp("whole")
    shutil.copy(Path(__file__).parent / "stub" / CONFIG, place)
    train(place)
    return place


@pytest.mark.parametrize(
    "only_files",
    [pytest.param(False, marks=pytest.mark.long, id="checkpoint"), pytest.param(True, id="files")],
)
def test_path_chkpt_prev_resumes_on_another_number_of_ranks(
    whole: Path, place: Path, only_files: bool
) -> None:
    before = links(whole)["step_3.preempt"]
    if only_files:  # as somebody copies them, or the stub itself would leave them
        (place / "prev").mkdir()
        for file in FILES:
            shutil.copy(before / file, place / "prev")
        before = place / "prev"
    (place / CONFIG).write_text(TEXT.replace("path_chkpt_prev: null", f"path_chkpt_prev: {before}"))
    found = train(place, ranks=2)
    expected = losses(whole / RUN / "metrics.jsonl")
    assert close(found, {step: loss for step, loss in expected.items() if step > 3})
    ours, theirs = (read_ledger(one / RUN / LEDGER).fed for one in (place, whole))
    for step in range(4, 11):
        assert np.array_equal(ours[step].digests, theirs[step].digests)
    state, wanted = (iter_state(links(one)["step_10"]) for one in (place, whole))
    for key in ("epoch", "seg", "start_idx", "end_idx", "step", "batch"):
        assert state[key] == wanted[key]


def test_files_that_the_stub_itself_has_left_resume(place: Path) -> None:
    """As it saves them: no names in the optimizer's state, no number of steps, positions among the
    parameters, and DDP's word before the name of each."""
    model = build_model(resolve_config("vit_mae", "debug", overrides=SMALL | {"num_channels": 1}))
    weights = {name: torch.randn_like(one) * 0.05 for name, one in model.state_dict().items()}
    wrapped = {f"module.{name}": one for name, one in weights.items()}
    parameters = [torch.nn.Parameter(one) for one in weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for _ in range(7):
        sum(one.square().sum() for one in parameters).backward()
        optimizer.step()
    before = place / "dummy-0.0.2024_0101_0000_00"
    before.mkdir()
    progress = {"epoch": 1, "seg": 2, "start_idx": 12, "end_idx": 18, "loss_min": torch.tensor(0.5)}
    for file, saved in zip(
        FILES,
        (wrapped, optimizer.state_dict(), {"last_epoch": 7, "_step_count": 8}, progress),
        strict=True,
    ):
        torch.save(saved, before / file)
    (place / CONFIG).write_text(TEXT.replace("path_chkpt_prev: null", f"path_chkpt_prev: {before}"))
    done = overland("train", CONFIG, *WORDS, cwd=place, NGPU="1")
    assert "at step 7" in done.stdout
    assert "does not record which data it has seen" in done.stdout
    assert list(losses(place / RUN / "metrics.jsonl")) == [8, 9, 10]
    state = torch.load(links(place)["step_8"] / "optim_state_dict.pt", weights_only=True)
    assert {float(one["step"]) for one in state["state"].values()} == {8.0}
    assert iter_state(links(place)["step_8"])["loss_min"] == 0.5  # none is better yet
    assert {file.name for file in before.iterdir()} == {*FILES}


def without_optimizer(files: Path) -> None:
    (files / FILES[1]).unlink()


def at_a_step_that_is_no_number(files: Path) -> None:
    torch.save(iter_state(files) | {"step": "x"}, files / FILES[3])


def at_a_step_below_zero(files: Path) -> None:
    torch.save(iter_state(files) | {"step": -3}, files / FILES[3])


def of_a_larger_model(files: Path) -> None:
    weights = torch.load(files / FILES[0], weights_only=True)
    torch.save(weights | {"vit.encoder.layer.2.weight": torch.zeros(2)}, files / FILES[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_optimizer, "has no optimizer.vit.embeddings.cls_token.exp_avg and .*optimizer`"),
        (at_a_step_that_is_no_number, "has step 'x', expected"),
        (at_a_step_below_zero, "has step -3, expected"),
        (of_a_larger_model, "has model.vit.encoder.layer.2.weight, which the model in this config"),
    ],
)
def test_half_of_the_four_files_is_refused_and_leaves_nothing_behind(
    whole: Path, place: Path, change: Callable[[Path], None], says: str
) -> None:
    (place / "prev").mkdir()
    for file in FILES:
        shutil.copy(links(whole)["step_3.preempt"] / file, place / "prev")
    change(place / "prev")
    words = [*WORDS, "checkpoint.resume=prev"]
    for command in ("check", "train"):
        done = overland(command, CONFIG, *words, cwd=place, code=2, NGPU="1")
        assert re.search(says, done.stdout + done.stderr), done.stdout + done.stderr
    assert not list((place / RUN).glob("checkpoint/step_*"))


@pytest.mark.long
def test_a_signal_saves_preemptively_and_the_same_line_goes_on(place: Path) -> None:
    long_run = [*WORDS, "training.epochs=100000"]
    command = start_overland("train", CONFIG, *long_run, cwd=place, NGPU="2")
    wait_for_step(place / RUN / "metrics.jsonl", 5)
    code, output = interrupt(command, signal.SIGTERM)
    assert code == 75, output
    last = max(losses(place / RUN / "metrics.jsonl"))
    link = links(place)[f"step_{last}.preempt"]
    assert iter_state(link)["step"] == last
    found = train(place, f"training.epochs={(last + 2) / 5}", ranks=1)
    assert max(found) == last + 2
    assert "none repeated, none skipped" in overland("prove", "data", str(RUN), cwd=place).stdout


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_same_samples(whole: Path, place: Path) -> None:
    words = [*WORDS, "job.custom_import=tests.seams.images"]
    killed = start_overland("train", CONFIG, *words, cwd=place, NGPU="1", DIES_AFTER="7")
    assert killed.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL), killed.stdout
    found = train(place, ranks=2)
    assert close(found, losses(whole / RUN / "metrics.jsonl"))
    proof = overland("prove", "data", str(RUN), cwd=place).stdout
    assert "40 rows, none repeated, none skipped" in proof


def test_lists_of_real_images_are_trained_and_validated_on(place: Path) -> None:
    write_images(place, 12)
    found = train(place, "images.instance_norm=true")
    assert len(found) == 6  # two epochs of twelve, by four
    assert "random images" not in (place / RUN / "README.md").read_text()
    record = [r for r in read_metrics(place / RUN / "metrics.jsonl") if "validation_loss" in r][-1]
    assert "validation_loss/safetensor_dataset.validate.csv" in record
    assert "24 rows" in overland("prove", "data", str(RUN), cwd=place).stdout


@pytest.mark.parametrize(("dropped", "steps"), [("true", 2), ("false", 3)])
def test_drop_last_leaves_out_what_does_not_fill_a_batch(
    place: Path, dropped: str, steps: int
) -> None:
    for name in ("drop_last_in_sampler", "drop_last_in_loader"):
        text = (place / CONFIG).read_text()
        assert f"{name}: true" in text
        (place / CONFIG).write_text(text.replace(f"{name}: true", f"{name}: {dropped}"))
    words = [*WORDS, "images.count=10", "training.epochs=1"]
    config = load_config(str(place / CONFIG), words, {}).config
    assert known_steps(config, global_batch_size=4) == steps


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_trains_and_float16_has_a_scaler(place: Path, dtype: str) -> None:
    (place / CONFIG).write_text(TEXT.replace("dtype: bfloat16", f"dtype: {dtype}"))
    words = [word for word in WORDS if "mixed_precision" not in word]
    overland("train", CONFIG, *words, "training.epochs=1", cwd=place, NGPU="2")
    state = torch.load(
        links(place)["step_5"] / "iter_state_dict.pt",
        weights_only=True,
    )
    assert (state["other"]["scaler.scale"] > 1) == (dtype == "float16")
    assert all(np.isfinite(loss) for loss in losses(place / RUN / "metrics.jsonl").values())


def write_images(place: Path, count: int, shape: tuple[int, int] = (30, 28)) -> None:
    """Lists of safetensors where the YAML looks for them."""
    folder = place / "experiments" / "datasets"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, number in (("train", count), ("validate", 8)):
        files = [f"{name}-{i}.safetensors" for i in range(number)]
        for file in files:
            save_file({"image": draw.integers(0, 4000, shape, np.uint16)}, folder / file)
        (folder / f"safetensor_dataset.{name}.csv").write_text("\n".join(["path", *files]) + "\n")


# Lines that start many processes


@pytest.mark.long
def test_mpirun_starts_it(whole: Path, place: Path) -> None:
    need("mpirun")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    run(["mpirun", "--oversubscribe", "-n", "4", *SCRIPT, *WORDS], place, **root)
    assert close(losses(place / RUN / "metrics.jsonl"), losses(whole / RUN / "metrics.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "tasks", "program"),
    [(1, 4, SCRIPT), (2, 2, SCRIPT), (1, 2, COMMAND)],
    ids=["1-4-script", "2-2-script", "1-2-overland"],
)
def test_srun_starts_it(
    slurm: Slurm, whole: Path, place: Path, nodes: int, tasks: int, program: list[str]
) -> None:
    words = " ".join([*program, *(f"'{word}'" for word in WORDS)])
    line = f"srun --mpi=none --nodes {nodes} --ntasks-per-node {tasks} bash -c"
    env = environment(NCCL_NET_GDR_LEVEL="3", NCCL_CROSS_NIC="1", NCCL_ALGO="TREE or RING")
    slurm.run(*line.split(), words, env=env, cwd=place)
    assert close(losses(place / RUN / "metrics.jsonl"), losses(whole / RUN / "metrics.jsonl"))


@pytest.mark.long
def test_killed_on_two_nodes_it_goes_on_with_three_ranks_on_one(
    slurm: Slurm, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """zero3_hybrid on 2 nodes × 2, killed at a random step; then 1 × 3."""
    words = [
        *WORDS,
        "training.global_batch_size=12",
        "parallelism.sharding_stage=zero3_hybrid",
        "job.custom_import=tests.seams.images",
        "checkpoint.interval=3",
    ]
    alone = tmp_path_factory.mktemp("alone")
    for folder in (alone, place):
        shutil.copy(Path(__file__).parent / "stub" / CONFIG, folder)
        write_images(folder, 30)
    overland("train", CONFIG, *words, "training.epochs=4", cwd=alone, NGPU="1")
    expected = losses(alone / RUN / "metrics.jsonl")
    assert len(expected) == 10
    step = random.Random().randrange(4, 10)
    line = ["srun", "--mpi=none", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    words += ["training.epochs=4"]
    env = slurm.environment(environment(DIES_AFTER=str(step)))
    killed = subprocess.run(
        [*line, *SCRIPT, *words], cwd=place, env=env, capture_output=True, timeout=LIMIT_SECONDS
    )
    assert killed.returncode, "it was not killed"
    line = ["srun", "--mpi=none", "--nodes=1", "--ntasks-per-node=3", "--kill-on-bad-exit=1"]
    slurm.run(*line, *SCRIPT, *words, env=environment(), cwd=place)
    found = losses(place / RUN / "metrics.jsonl")
    assert close(found, expected), f"killed after step {step}: {found}, expected {expected}"
    ours, theirs = (read_ledger(one / RUN / LEDGER).fed for one in (place, alone))
    for number in expected:
        assert np.array_equal(ours[number].digests, theirs[number].digests), number
    proof = overland("prove", "data", str(RUN), cwd=place).stdout
    assert "120 rows, none repeated, none skipped" in proof
