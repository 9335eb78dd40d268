"""One row of the comparison, torchtitan's, by its own trainer:
`python benchmarks/gpu/peer_torchtitan.py 1B`, with torchtitan 0.2.2 (and torchao 0.17, for fp8) on
the Python path.

Only the data is ours (random tokens, as on our side); model, compilation, precision, optimizer and
step are torchtitan's, with its defaults. Prints one line of JSON. With --world 8 this is one rank
of eight (local_world.py), and what wraps the model is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import types
from collections import Counter
from typing import Any

import local_world
import torch
from kinds import device_time
from shapes import SHAPES, STEPS, Shape
from torch.distributed.fsdp import FSDPModule


def stand_in(name: str, **members: Any) -> None:
    """A module that torchtitan imports and this run never uses."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


stand_in("datasets", Dataset=object, load_dataset=None)
stand_in("datasets.distributed", split_dataset_by_node=None)
stand_in("torch.utils.tensorboard", SummaryWriter=object)

import torchtitan.models.llama3 as llama3  # noqa: E402
import torchtitan.protocols.train_spec as train_spec  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

# The released Llama 3.2 sizes, which torchtitan does not list; its rules give the MLP's 8192.
Args = llama3.TransformerModelArgs
llama3.llama3_args["1B"] = Args(
    dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, rope_theta=500000
)
llama3.llama3_args["3B"] = Args(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, rope_theta=500000)
llama3.llama3_args["debug"] = llama3.llama3_args["debugmodel"]

# Tensorwise is its default recipe; its guide leaves the head in bfloat16, as we do.
TRACED_STEPS = 3
FLOAT8 = [
    "--model.converters=quantize.linear.float8",
    "--quantize.linear.float8.filter_fqns=output",
]


class RandomTokens(BaseDataLoader):
    def __init__(self, shape: Shape, vocab_size: int) -> None:
        self.size, self.vocab_size = (shape.rows, shape.seq_len), vocab_size

    def __iter__(self) -> Any:
        while True:
            tokens, labels = (torch.randint(0, self.vocab_size, self.size) for _ in range(2))
            if torch.cuda.is_available():
                tokens, labels = tokens.pin_memory(), labels.pin_memory()
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def measure(shape: Shape, options: list[str], world: int, profile: bool) -> dict[str, Any]:
    started = time.perf_counter()
    vocab_size = llama3.llama3_args[shape.flavor].vocab_size
    spec = llama3.get_train_spec()
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda **_: RandomTokens(shape, vocab_size)
    spec.state_dict_adapter = None
    train_spec.register_train_spec("llama3_random", spec)
    config = ConfigManager().parse_args(
        [
            "--model.name=llama3_random",
            f"--model.flavor={shape.flavor}",
            f"--training.seq_len={shape.seq_len}",
            f"--training.local_batch_size={shape.rows}",
            "--training.steps=1000",
            "--optimizer.lr=1e-4",
            "--compile.enable",
            # Sharded, everything fits.
            f"--activation_checkpoint.mode={shape.peer_recompute if world == 1 else 'none'}",
            "--activation_checkpoint.selective_ac_option=op",
            "--metrics.log_freq=1000",
            f"--job.dump_folder={tempfile.mkdtemp()}",
            *(FLOAT8 if shape.float8 != "off" else []),
            *options,
        ]
    )
    trainer = Trainer(config)
    wrapped = wrapper(trainer.model_parts[0])
    print(wrapped, flush=True)
    data = trainer.batch_generator(trainer.dataloader)

    def steps(number: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(number):
            trainer.step += 2  # never the first step, which it would log
            trainer.train_step(data)
        synchronize()
        return time.perf_counter() - start

    steps(STEPS)
    seconds = steps(STEPS)
    on_gpu = torch.cuda.is_available()
    result = {
        "tokens_per_second": STEPS * shape.tokens / seconds,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "seconds": time.perf_counter() - started,
        "wrapper": wrapped,
    }
    if profile:
        result["kinds"] = device_time(lambda: steps(TRACED_STEPS), TRACED_STEPS)
    return result


def wrapper(model: torch.nn.Module) -> str:
    """What torchtitan has wrapped most parts of the model in."""
    kinds: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                ranks, policy = group.mesh_info.mesh.size(), group.mp_policy
                reshard = group._reshard_after_forward
                kinds[f"FSDP, {ranks} ranks, {policy}, reshard after forward: {reshard}"] += 1
    return "; ".join(f"{n} × {kind}" for kind, n in kinds.items()) or "not sharded"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--world", type=int, default=1, help="ranks, of which only one exists")
    parser.add_argument("--network", choices=local_world.NETWORKS, default="none")
    parser.add_argument("--profile", action="store_true")
    args, options = parser.parse_known_args()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{args.world}"}
    port = os.environ.get("MASTER_PORT", "29531")
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if args.world > 1:
        local_world.use(args.network)
    row = measure(SHAPES[args.shape], options, args.world, args.profile)
    print("RESULT " + json.dumps(row), flush=True)
    os._exit(0)  # its process group waits for no one


if __name__ == "__main__":
    main()
