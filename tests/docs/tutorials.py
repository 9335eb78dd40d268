"""How each tutorial is run: what is made smaller, and what it needs.

`make test` runs the blocks of a page before `core`, `make prove-all` all of them. Both run them as
they are written, but for `changes`: what the page shows → what is run.
"""

from __future__ import annotations

import json
import pickle
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from overland.data.tokenizer import Tokenizer
from tests.cli.processes import DATA, TINY
from tests.cluster.slurm import Slurm
from tests.data.chats import PLAIN_CHATML, ROLES, write_lines, write_tokenizer
from tests.docs.pages import Step, run_page
from tests.hub.server import Hub

Variables = dict[str, str]
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Story:
    changes: dict[str, str] = field(default_factory=dict)
    core: str = ""  # `make test` stops before the block that holds this
    prepare: Callable[[Path], AbstractContextManager[Variables]] = lambda _: nullcontext({})
    env: Variables = field(default_factory=lambda: {"NGPU": "1"})

    def run(self, page: str, folder: Path, whole: bool) -> Iterator[Step]:
        with self.prepare(folder) as env:
            until = "" if whole else self.core
            yield from run_page(page, folder, self.changes, until, **self.env, **env)


@contextmanager
def hub_with(name: str, family: str, folder: Path) -> Iterator[Variables]:
    """A Hub on this machine, that has a tiny model of transformers under this name."""
    import transformers

    model = folder.with_name(f"{folder.name}-{family}")
    write_tokenizer(model, chat_template=PLAIN_CHATML, **ROLES["chatml"])
    sizes = {**SIZES, "vocab_size": Tokenizer(model).vocab_size}
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(model)
    hub = Hub()
    hub.add(name, {path.name: path.read_bytes() for path in model.iterdir()})
    try:
        yield {"HF_ENDPOINT": hub.url}
    finally:
        hub.close()


@contextmanager
def a_model_to_continue(folder: Path) -> Iterator[Variables]:
    lines = [{"text": f"The square of {i} is {i * i}, and so on."} for i in range(400)]
    write_lines(folder / "texts.jsonl", lines)
    with hub_with("Qwen/Qwen3-0.6B-Base", "Qwen3", folder) as env:
        yield env


def a_model_that_chats(folder: Path) -> AbstractContextManager[Variables]:
    return hub_with("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2", folder)


@contextmanager
def virtual_nodes(folder: Path) -> Iterator[Variables]:
    slurm = Slurm(2)
    try:
        names = slurm.environment({})
        yield {**names, "NGPU": ""}
    finally:
        slurm.stop()


@contextmanager
def shakespeares_characters(folder: Path) -> Iterator[Variables]:
    """What nanoGPT's data/shakespeare_char/prepare.py writes, of another text."""
    text = (json.__doc__ or "").lower()
    letters = sorted(set(text))
    ids = np.array([letters.index(letter) for letter in text * 20], dtype=np.uint16)
    where = folder / "data" / "shakespeare_char"
    where.mkdir(parents=True)
    ids[: len(ids) * 9 // 10].tofile(where / "train.bin")
    ids[len(ids) * 9 // 10 :].tofile(where / "val.bin")
    (where / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))
    yield {}


_TINY_QUICKSTART = (
    "train quickstart model.overrides='{hidden_size = 32, intermediate_size = 64, "
    "num_hidden_layers = 1, num_attention_heads = 4, num_key_value_heads = 4, vocab_size = 512}' "
    f"data.vocab_size=512 data.folder={DATA} training.seq_len=32 validation.steps=1"
)
_SITE = {
    'accelerator = "nvidia"': 'accelerator = "none"',
    'gpus = "per-node"': 'gpus = "none"',
    "devices_per_node = 4": "devices_per_node = 1",
    "cpus_per_task = 16": "cpus_per_task = 1",
}
_UNTIL = "until [ -s runs/quickstart/{} ]; do sleep 1; done\n"
_NO_JOBS = 'until [ -z "$(squeue --me --noheader)" ]; do sleep 1; done\n'
_END = "overland watch runs/quickstart --once\noverland report"
_SUBMIT = f"submit quickstart training.steps=300 checkpoint.interval=20 {shlex.join(TINY)}"

STORIES = {
    "docs/tutorials/own-text.md": Story(
        changes={
            "steps = 200": "steps = 4",
            "freq = 50": "freq = 2",
            "training.steps=300": "training.steps=6",
            "num_hidden_layers = 4": "num_hidden_layers = 1",
            "seq_len = 128": "seq_len = 32",
            "2048 ": "512 ",
        },
        core="overland train runs/own/config.toml",
    ),
    "docs/tutorials/continue-from-hugging-face.md": Story(
        changes={
            "seq_len = 2048": "seq_len = 64",
            "local_batch_size = 4": "local_batch_size = 2",
            "global_batch_size = 32": "global_batch_size = 4",
            "--context 1024": "--context 64",
            "steps = 200": "steps = 4",
            "warmup_steps = 20": "warmup_steps = 1",
            "lr = 2e-5": "lr = 2e-2",
            "freq = 50": "freq = 2",
            "interval = 50": "interval = 2",
        },
        core="overland eval runs/continued",
        prepare=a_model_to_continue,
    ),
    "docs/tutorials/lora-on-your-chats.md": Story(
        changes={
            "seq_len = 1024": "seq_len = 256",
            "epochs = 3.0": "epochs = 0.5",
            "freq = 20": "freq = 4",
            "lr = 2e-4": "lr = 2e-2",
        },
        core="overland convert runs/chat merged",
        prepare=a_model_that_chats,
    ),
    "docs/tutorials/one-gpu-to-64-nodes.md": Story(
        changes={
            'flavor = "8B"': 'flavor = "debug"',
            "seq_len = 8192": "seq_len = 64",
            "train quickstart": _TINY_QUICKSTART,
            "training.steps=20": "training.steps=2",
            "training.steps=30": "training.steps=3",
            "training.steps=40": "training.steps=4",
            # what is shown of the large model
            "llama3 8B": "llama3 debug",
            "an inner width of 14336": "a vocabulary of 2048",
        },
        core="overland preflight",
        env={},
    ),
    "docs/tutorials/when-training-goes-wrong.md": Story(core="overland check tiny.toml"),
    "docs/tutorials/first-cluster-job.md": Story(changes=_SITE, core="--sessions 2\n"),
    "docs/coming-from/nanogpt.md": Story(
        changes={
            "hidden_size = 384": "hidden_size = 32",
            "num_attention_heads = 6, num_key_value_heads = 6": "num_attention_heads = 4, "
            "num_key_value_heads = 4",
            "num_hidden_layers = 6": "num_hidden_layers = 1",
            "steps = 5000": "steps = 4",
            "seq_len = 256": "seq_len = 32",
            "local_batch_size = 64": "local_batch_size = 4",
            "steps = 200 ": "steps = 1 ",
            "freq = 250": "freq = 4",
            "interval = 250": "interval = 4",
            "warmup_steps = 100": "warmup_steps = 1",
        },
        prepare=shakespeares_characters,
    ),
}
# On Slurm itself, whose nodes are on this machine.
CLUSTER = Story(
    changes={
        **_SITE,
        "submit quickstart": _SUBMIT,
        "squeue --me\n": _UNTIL.format("metrics.jsonl") + "squeue --me\n",
        "touch runs/quickstart/STOP\n": "scancel --state=PENDING --me\n"
        "touch runs/quickstart/STOP\n" + _NO_JOBS,
        _END: _NO_JOBS + _UNTIL.format("done") + _END,
    },
    prepare=virtual_nodes,
    env={},
)
