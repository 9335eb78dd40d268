"""`torchrun … train.py --data_dir D --config C --tokenizer_dir T …`, which runs `overland train`.

Settings without a flag may follow as section.key=value: train.py … optimizer.lr=6e-4
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import datas

from overland.checkpoint.folder import newest_in
from overland.cli.main import app
from overland.config.arguments import ngpu
from overland.world.devices import num_local_ranks
from overland.world.launchers import find_world

HERE = os.path.dirname(os.path.abspath(__file__))
WORLD = find_world()
NUM_RANKS = WORLD.size if WORLD else ngpu(os.environ) or num_local_ranks()


FORMAT_ONLY = "FineWeb-Edu"  # needs no loader: MDS, and any other format, is read as it is


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", required=True, help="MDS shards, or any other format")
    parser.add_argument("--data_name", default=FORMAT_ONLY, help="a loader in datas/, or any label")
    parser.add_argument("--local_cache_dir", default="data", help="folder for token shards")
    parser.add_argument("--config", required=True, help="Hugging Face config.json, or its folder")
    parser.add_argument("--tokenizer_dir")
    parser.add_argument(
        "--output_dir", default="outputs/run1", help="run folder; its last part names the run"
    )
    parser.add_argument("--run_name", help="the run folder is OUTPUT_DIR/RUN_NAME instead")
    parser.add_argument("--global_batch", type=int, default=256, help="sequences per step")
    parser.add_argument("--local_batch", type=int, default=32, help="maximum sequences per pass")
    parser.add_argument("--train_steps", type=int, default=200_000)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--strategy", default="pack", choices=["pack", "overflow", "trunc"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--enable_flash", action="store_true", help="no effect: used if available")
    parser.add_argument("--enable_recompute", action="store_true", help="less memory, more time")
    parser.add_argument("--enable_slt", action="store_true", help="2:4 sparse linear layers")
    parser.add_argument("--enable_tensorboard", action="store_true")
    parser.add_argument("--tensorboard_dir", help="parent of a folder named after the run")
    parser.add_argument("--ckpt_type", default="shard", choices=["full", "shard", "local"])
    parser.add_argument("--resume_dir", help="a step_N to resume from; default: the newest")
    parser.add_argument(
        "--skip_optimizer", action="store_true", help="resume with a fresh optimizer"
    )
    parser.add_argument(
        "--eval_every", type=int, default=0, help="steps between evaluations; 0: never"
    )
    parser.add_argument(
        "--c4_dir", help="C4's validation set; default: LOCAL_CACHE_DIR/c4_validation"
    )
    return parser


def settings(given: argparse.Namespace) -> list[str]:
    """Returns the flags as settings of Overland's config."""
    output_dir = os.path.abspath(os.path.join(given.output_dir, given.run_name or ""))
    own_name = os.path.basename(output_dir)
    inner = os.path.join(output_dir, own_name)  # where earlier versions saved, or another run
    is_older = os.path.isdir(inner) and not os.path.isfile(os.path.join(inner, "config.toml"))
    found = {
        "job.dump_folder": output_dir,
        "model.config": given.config,
        "model.hf_assets_path": given.tokenizer_dir,
        "data.folder": given.local_cache_dir,
        "data.packing": given.strategy,
        "training.dataset_path": given.data_dir,
        "training.seq_len": given.seq_len,
        "training.steps": given.train_steps,
        "training.global_batch_size": given.global_batch,
        "training.local_batch_size": rows_per_pass(given.global_batch, given.local_batch),
        "training.mixed_precision_param": "bfloat16" if given.bf16 else "float32",
        "activation_checkpoint.mode": "full" if given.enable_recompute else "none",
        "metrics.enable_tensorboard": str(given.enable_tensorboard).lower(),
        "metrics.save_tb_folder": os.path.abspath(given.tensorboard_dir)
        if given.enable_tensorboard and given.tensorboard_dir
        else None,
        "checkpoint.folder": own_name if is_older else ".",
        "checkpoint.type": given.ckpt_type,
        "checkpoint.resume": given.resume_dir,
        "checkpoint.skip_optimizer": "true" if given.skip_optimizer else None,
    }
    loader = given.data_name.replace("-", "_")
    if loader in datas.loaders():
        os.environ["DATA_DIR"] = given.data_dir
        found["training.dataset_path"], found["training.dataset"] = None, loader
    elif given.data_name != FORMAT_ONLY:
        say(f"datas/ has no open_source for {given.data_name}; --data_dir is read by its format")
    if given.tensorboard_dir and not given.enable_tensorboard:
        say("--tensorboard_dir has no effect without --enable_tensorboard")
    if given.enable_slt:
        found["model.sparse.pattern"] = "2:4"
        found["model.sparse.method"] = "slt" if find_spec("slt") else None
        if is_dense(newest_in(Path(given.resume_dir or output_dir))):
            found["checkpoint.allow_changes"] = '["model.sparse"]'
    if given.eval_every:
        c4 = given.c4_dir or os.path.join(given.local_cache_dir, "c4_validation")
        found |= {"validation.enable": "true", "validation.sets.c4.path": c4,
                  "validation.sets.c4.freq": given.eval_every}  # fmt: skip
    return [f"{key}={value}" for key, value in found.items() if value is not None]


def is_dense(checkpoint: Path) -> bool:
    """Whether this is a checkpoint without masks, which then follow from its weights. Other changes
    of the masks are refused: `slt` may be missing from PYTHONPATH."""
    try:
        run = json.loads((checkpoint / "index.json").read_bytes())["run"]
        return run["config"]["model"]["sparse"] is None
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or the trainer says why
        return False


def rows_per_pass(total: int, most: int) -> int:
    """Returns the most rows that a rank can take per pass, if all passes have the same size."""
    share, rest = divmod(total, NUM_RANKS)
    if rest or share < 1:
        refuse(f"--global_batch {total} cannot be divided evenly among {NUM_RANKS} ranks")
    if most < 1:
        refuse(f"--local_batch {most}: expected 1 or more")
    rows = max(n for n in range(1, min(most, share) + 1) if share % n == 0)
    if rows < most:
        passes = share // rows
        say(f"--local_batch {most} is an upper bound; each rank takes {passes} × {rows} per step")
    return rows


def refuse(problem: str) -> NoReturn:
    print(problem, file=sys.stderr)
    sys.exit(2)


def say(note: str) -> None:
    if WORLD is None or WORLD.is_first:
        print(f"note: {note}", file=sys.stderr)


if __name__ == "__main__":
    known, more = flags().parse_known_args()
    app(["train", f"{HERE}/playground.toml", *settings(known), *more])
