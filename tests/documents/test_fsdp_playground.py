"""`fsdp-playground`: train.py with all its flags, the loaders in datas/, perplexity on C4."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path

import pytest

from overland.apps.data.tokenizer_training import train_tokenizer
from overland.world.launch import free_port
from tests.cli.processes import losses, read_metrics
from tests.data.chats import write_lines
from tests.data.sources.test_mds import write_mds
from tests.documents.scripts import copied, typed
from tests.jobs import write_model

TEXTS = [f"Document {i} tells of {i} foxes, and of how they jump over {i} dogs" for i in range(300)]
FLAGS = (
    "--data_dir=fineweb-edu --data_name=FineWeb-Edu --local_cache_dir=mds_cache "
    "--config=llama/config.json --tokenizer_dir=tokenizer --output_dir=checkpoints/run1 "
    "--tensorboard_dir=logs/tensorboard --global_batch=8 --local_batch=32 --enable_tensorboard "
    "--seq_len=64 "
)
MORE = "--bf16 --enable_flash --enable_recompute --enable_slt --eval_every=2 --c4_dir=c4 "
SMALL = "metrics.log_freq=1 lr_scheduler.warmup_steps=2 lr_scheduler.total_steps=6"
SLT = """
from overland.models.sparse import largest, register_mask

register_mask("slt", lambda weight, kept, group: largest(weight, kept - 1, group))
"""
LOADER = """
from overland.data.sources import open_source as open_files


def open_source(data_dir):
    return open_files(data_dir, column="abstract")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's: the scripts, MDS shards, a model's config and a tokenizer."""
    folder = copied("fsdp-playground", tmp_path_factory.mktemp("playground"))
    write_mds(folder / "fineweb-edu", {"text": "str"}, [{"text": one.encode()} for one in TEXTS])
    write_lines(folder / "c4/validation.jsonl", [{"text": one[::-1]} for one in TEXTS[:40]])
    write_lines(folder / "papers/a.jsonl", [{"id": 1, "abstract": one} for one in TEXTS])
    write_model(folder / "llama")
    (folder / "tokenizer").mkdir()
    train_tokenizer(TEXTS, 400, folder / "tokenizer/tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """What torchrun says, with all flags; then again, from the step that was saved."""
    launch = f"torchrun --nnodes=1 --nproc_per_node=2 --node_rank=0 --master_port={free_port()}"
    return typed(
        f"{launch} train.py {FLAGS} {MORE} --train_steps=4 --ckpt_type=full {SMALL}", folder
    )


def test_torchrun_trains_with_all_flags(trained: str, folder: Path) -> None:
    run = folder / "checkpoints/run1"
    assert max(losses(run / "metrics.jsonl")) == 4
    config = (run / "config.toml").read_text()
    for line in (
        'mixed_precision_param = "bfloat16"',
        'type = "full"',
        'mode = "full"',
        "sparse = {}",  # on, with its defaults
        "global_batch_size = 8",
        "local_batch_size = 4",
    ):
        assert line in config
    assert "note: --local_batch 32 is an upper bound; each rank takes 1 × 4 per step" in trained
    assert trained.count("is an upper bound") == 1
    assert "open_source" not in trained  # FineWeb-Edu, the document's own, needs no loader
    assert list((folder / "logs/tensorboard/run1").glob("events.out.tfevents.*"))
    files = [path.name for path in (run / "step_4").glob("rank_*")]
    assert files == ["rank_00000.safetensors"]  # full: the first rank writes all


def test_c4_is_measured_under_the_name_that_it_has_there(trained: str, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "logs/tensorboard/run1")).Reload()
    seen = {one.step: one.value for one in events.Scalars("eval/c4_ppl")}
    assert sorted(seen) == [2, 4]
    records = read_metrics(folder / "checkpoints/run1/metrics.jsonl")
    last = next(one for one in reversed(records) if "eval/c4_ppl" in one)
    assert last["eval/c4_ppl"] == pytest.approx(math.exp(last["validation/c4/loss"]))
    assert seen[4] == pytest.approx(last["eval/c4_ppl"], rel=1e-6)
    assert events.Scalars("train/sparsity")[-1].value == 0.5


PLAIN = FLAGS.replace("run1", "run2").replace("global_batch=8", "global_batch=6")


@pytest.mark.long
def test_a_run_goes_on_from_a_step_with_another_optimizer_or_its_own(folder: Path) -> None:
    typed(
        f"python train.py {PLAIN} --train_steps=6 checkpoint.interval=3 {SMALL}", folder, NGPU="1"
    )
    run = folder / "checkpoints/run2"
    whole, step = losses(run / "metrics.jsonl"), run / "step_3"
    again = PLAIN.replace("run2", "run3") + f"--train_steps=6 --resume_dir={step} {SMALL}"
    typed(f"python train.py {again}", folder, NGPU="1")
    gone_on = losses(folder / "checkpoints/run3/metrics.jsonl")
    assert gone_on == {number: whole[number] for number in (4, 5, 6)}
    fresh = again.replace("run3", "run4") + " --skip_optimizer"
    typed(f"python train.py {fresh}", folder, NGPU="1")
    other = losses(folder / "checkpoints/run4/metrics.jsonl")
    assert other[4] == whole[4]
    assert other[6] != whole[6]


@pytest.mark.long
def test_a_loader_of_ones_own_and_the_slt_package(folder: Path) -> None:
    (folder / "datas/arxiv_papers.py").write_text(LOADER)
    (folder / "elsewhere/slt").mkdir(parents=True)
    (folder / "elsewhere/slt/__init__.py").write_text(SLT)
    flags = PLAIN.replace("run2", "run5").replace("fineweb-edu", "papers").replace(
        "FineWeb-Edu", "arxiv-papers"
    )  # fmt: skip
    line = "PYTHONPATH=elsewhere:$PYTHONPATH python train.py"
    said = typed(f"{line} {flags} --enable_slt --train_steps=2 {SMALL}", folder, NGPU="1")
    assert "open_source" not in said
    record = read_metrics(folder / "checkpoints/run5/metrics.jsonl")[-1]
    assert record["train/sparsity"] == 0.75
    line = f"python train.py {flags} --enable_slt --train_steps=3 {SMALL}"
    without = typed(line, folder, code=2, NGPU="1")  # other masks, since slt cannot be imported
    assert 'model.sparse.method = "slt", and this config has "magnitude"' in without
    plan = json.loads((folder / "checkpoints/run5/data/plan.json").read_text())
    assert list(plan["corpora"]) == ["arxiv_papers"]


@pytest.mark.long
def test_batches_and_the_perplexity_of_a_model_by_themselves(folder: Path) -> None:
    pytest.importorskip("transformers")
    program = """
from datas.SmolLM import load_data
from datas.C4.c4_eval import evaluate_c4_ppl
from transformers import AutoModelForCausalLM

loader = load_data.build_train_loader(
    mds_root="fineweb-edu", strategy="pack", tokenizer_name="tokenizer", seq_len=32,
    micro_blocks=4, local_cache="mds_cache",
)
model = AutoModelForCausalLM.from_pretrained("llama")
batch = next(iter(loader))
print("batch", list(batch["input_ids"].shape), model(**batch).loss.item() > 0)
print("c4", evaluate_c4_ppl(model, "tokenizer", "c4", seq_len=32), model.training)
print("c4", evaluate_c4_ppl(model, "tokenizer", "c4", seq_len=32, batch=1), model.training)
"""
    (folder / "own.py").write_text(program)
    said = typed("python own.py", folder)
    assert "batch [4, 32] True" in said
    found = re.findall(r"c4 \(([\d.]+), (\d+)\) False", said)
    (perplexity, tokens), again = found
    assert float(perplexity) == pytest.approx(float(again[0]), rel=1e-6)
    assert 300 < float(perplexity) < 800  # of 512 tokens, and nothing learned
    assert int(tokens) == int(again[1]) > 400


def test_a_batch_that_cannot_be_dealt_is_one_sentence(folder: Path) -> None:
    flags = FLAGS.replace("global_batch=8", "global_batch=256")
    said = typed(f"NGPU=48 DRY_RUN=1 python train.py {flags}", folder, code=2)
    assert (
        said.strip().splitlines()[-1]
        == "--global_batch 256 cannot be divided evenly among 48 ranks"
    )
    said = typed(f"NGPU=32 DRY_RUN=1 python train.py {flags} --local_batch=0", folder, code=2)
    assert said.strip() == "--local_batch 0: expected 1 or more"
    flags += "--no_such_flag --data_name=../SmolLM"
    said = typed(f"NGPU=32 DRY_RUN=1 python train.py {flags}", folder, code=2)
    assert "datas/ has no open_source for ../SmolLM; --data_dir is read by its format" in said
    assert "--local_batch 32 is an upper bound; each rank takes 1 × 8 per step" in said
    assert "no_such_flag" in said


PLACES = """
import train

for words in (
    "--output_dir=ck/run1", "--output_dir=ck --run_name=run1", "--output_dir=ck/run1 --run_name=b",
    "--output_dir=ck/twice --run_name=twice", "--output_dir=ck/twice", "--output_dir=ck/older",
    "--output_dir=ck/dense --enable_slt", "--output_dir=ck/sparse --enable_slt",
    "--output_dir=ck/sparse --enable_slt --resume_dir=ck/dense/step_1",
):
    known = train.flags().parse_args(["--data_dir=d", "--config=c", *words.split()])
    keys = dict(one.split("=") for one in train.settings(known))
    allowed = keys.get("checkpoint.allow_changes", keys["checkpoint.folder"])
    print(keys["job.dump_folder"].partition("/ck/")[2], allowed)
"""


def test_a_run_is_where_its_name_says_and_never_takes_anothers_checkpoints(folder: Path) -> None:
    for path in ("twice/twice/step_1", "older/older/step_1"):
        (folder / "ck" / path).mkdir(parents=True)
    (folder / "ck/twice/twice/config.toml").touch()  # a run of its own, named like its parent
    for name, sparse in (("dense", None), ("sparse", {"method": "slt"})):
        step = folder / "ck" / name / "step_1"
        step.mkdir(parents=True)
        (step / "COMMITTED").touch()
        (step / "index.json").write_text(
            json.dumps({"run": {"config": {"model": {"sparse": sparse}}}})
        )
    (folder / "places.py").write_text(PLACES)
    said = typed("python places.py", folder, NGPU="1").splitlines()
    found = [line for line in said if line.count(" ") == 1]
    assert found == [
        "run1 .", "run1 .", "run1/b .", "twice/twice .", "twice .", "older older",
        'dense ["model.sparse"]', "sparse .", 'sparse ["model.sparse"]',
    ]  # fmt: skip


def test_where_a_run_and_its_checkpoints_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OUTPUT_DIR, whose last part is not repeated unless an earlier version did so, or
    OUTPUT_DIR/RUN_NAME."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    train = runpy.run_path("train.py")

    def places(*flags: str) -> list[str]:
        needed = ["--data_dir=fineweb-edu", "--config=llama/config.json"]
        found = train["settings"](train["flags"]().parse_args([*needed, *flags]))
        return [one for one in found if one.startswith(("job.dump_folder=", "checkpoint.folder="))]

    assert places("--output_dir=out/run9") == [
        f"job.dump_folder={folder}/out/run9", "checkpoint.folder=."
    ]  # fmt: skip
    assert places("--output_dir=out", "--run_name=b")[0] == f"job.dump_folder={folder}/out/b"
    (folder / "earlier/run9/run9").mkdir(parents=True)
    assert places("--output_dir=earlier/run9")[1] == "checkpoint.folder=run9"
