"""A published walkthrough for Frontier, chapter by chapter, on a real Slurm of virtual nodes: Llama
is fetched on a login node, fine-tuned with LoRA by a job without a network, merged and asked.

    python -m tests.cluster.walkthrough docs/evidence/walkthrough.md

The model is a tiny one with random weights, and the Hub a server on this machine, which is gone
before the job starts. What is run is what docs/finetuning.md says, with the recipe's own values.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from overland.data.tokenizer import Tokenizer
from tests.cli.processes import losses, overland
from tests.cli.test_offline import HOOK
from tests.cluster.slurm import Slurm
from tests.data.chats import ROLES, write_tokenizer
from tests.hub.server import TOKEN, Hub
from tests.jobs import write_model

MODEL, DATASET = "meta-llama/Meta-Llama-3-8B", "mlabonne/guanaco-llama2-1k"
RECIPE = "sft_lora_llama3_8b"
ROWS = 16  # of a batch, in the recipe
SETTINGS = [
    "model.from=$SCRATCH_ROOT/llama-models-cache",
    "model.hf_assets_path=$SCRATCH_ROOT/llama-tokenizers-cache",
    "training.dataset_path=$SCRATCH_ROOT/data_cache/mlabonne___guanaco-llama2-1k",
    "job.dump_folder=results_modified",
]
SITE = """\
description = "virtual nodes"
accelerator = "none"
[slurm]
gpus = "none"
devices_per_node = {ranks_per_node}
cpus_per_task = 1
[environment]
OMP_NUM_THREADS = "1"
# Whoever tries to leave the machine is refused, and noted.
PYTHONPATH = "{hook}"
OVERLAND_ATTEMPTS = "{attempts}"
OVERLAND_NODES = "{nodes}"
"""


class Walk:
    """What a user types in `folder`, and what came of it."""

    def __init__(
        self, slurm: Slurm, folder: Path, conversations: int, ranks_per_node: int, *flags: str
    ) -> None:
        """`flags` are of `overland submit`."""
        self.slurm, self.folder, self.num, self.flags = slurm, folder, conversations, flags
        self.num_ranks = 2 * ranks_per_node
        self.steps = -(-conversations // ROWS)
        self.scratch = folder / "scratch"
        self.results = folder / "results_modified"
        self.page: list[str] = []
        site = SITE.format(
            ranks_per_node=ranks_per_node,
            hook=HOOK,
            attempts=folder / "attempts",
            nodes=" ".join(slurm.nodes),
        )
        (folder / "site.toml").write_text(site)

    def all(self) -> None:
        self.prepare()
        hub = self.hub()
        try:
            self.fetch_model(hub)
            self.fetch_dataset(hub)
        finally:
            hub.close()
        self.configure()
        self.submit()
        self.inspect()
        self.convert()
        self.ask()

    # Chapter 1

    def prepare(self) -> None:
        self.chapter("1. Prepare the environment")
        script = self.overland("env", "frontier")
        (self.folder / "setup.sh").write_text(script)
        subprocess.run(["bash", "-n", "setup.sh"], cwd=self.folder, check=True)
        self.says("A script that bash accepts. It is for Frontier, and was not run here.")

    # Chapters 2 and 3, on a login node

    def hub(self) -> Hub:
        hub, tiny = Hub(), self.folder / "tiny"
        write_tokenizer(tiny, **ROLES["llama3"])
        write_model(tiny, vocab_size=Tokenizer(tiny).vocab_size, max_position_embeddings=1024)
        files = {path.name: path.read_bytes() for path in tiny.iterdir()}
        hub.add(MODEL, files, gated=True)
        asked = [f"<s>[INST] Add {i} and {i}. [/INST] It is {2 * i}. </s>" for i in range(self.num)]
        table, file = pa.table({"text": asked}), io.BytesIO()
        pq.write_table(table, file)
        name = "data/train-00000-of-00001.parquet"
        hub.add(DATASET, {name: file.getvalue()}, kind="dataset")
        return hub

    def fetch_model(self, hub: Hub) -> None:
        self.chapter("2. Download model and tokenizer")
        words = ["fetch", "model", MODEL, "--to", "$SCRATCH_ROOT/llama-models-cache"]
        refused = self.overland(*words, code=2, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert f"accept its license at {hub.url}/{MODEL}" in refused, refused
        self.says("Refused as long as the license is not accepted, with its address. Then:")
        hub.repos["model", MODEL].gated = False
        self.overland(*words, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        words = ["fetch", "tokenizer", MODEL, "--to", "$SCRATCH_ROOT/llama-tokenizers-cache"]
        self.overland(*words, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        for cache, file in (("models", "model.safetensors"), ("tokenizers", "tokenizer.json")):
            fetched = self.scratch / f"llama-{cache}-cache" / file
            assert fetched.read_bytes() == (self.folder / "tiny" / file).read_bytes(), file
        self.overland("fetch", "model", MODEL, "--to", words[-1].replace("tokenizers", "models"),
                      "--verify")  # fmt: skip
        self.says("Both are here, and every byte is the Hub's.")

    def fetch_dataset(self, hub: Hub) -> None:
        self.chapter("3. Cache the training dataset")
        self.overland("fetch", "dataset", DATASET, HF_ENDPOINT=hub.url)
        folder = self.scratch / "data_cache/mlabonne___guanaco-llama2-1k"
        assert list(folder.rglob("*.parquet"))
        self.says(
            "It is where the walkthrough has it, as parquet, which is read directly. From here on, "
            "there is no Hub."
        )

    # Chapters 4 and 5

    def configure(self) -> None:
        self.chapter("4. Configure the training job")
        said = self.overland("check", RECIPE, *SETTINGS, "--world-size", str(self.num_ranks))
        assert "The config is valid." in said
        assert "texts in column text" in said
        self.says("Valid: the data is recognized as texts, of which every token is learned.")

    def submit(self) -> None:
        self.chapter("5. Submit the run")
        words = ["submit", RECIPE, *SETTINGS, "--site", "site.toml", "--nodes", "2"]
        env = {"SLURM_CONF": str(self.slurm.config)}
        words += ["--time", "01:00:00", *self.flags]
        said = self.overland(*words, as_json=True, HF_TOKEN=TOKEN, **env)
        submitted = json.loads(said)
        script, job = Path(submitted["script"]).read_text(), int(submitted["jobs"][0])
        assert TOKEN not in script
        assert "HF_HUB_OFFLINE=1" in script
        shown = self.slurm.wait_for(job, lambda: self.log(job))
        assert " JobState=COMPLETED " in shown, self.log(job)
        assert f"Finished: {self.steps} steps" in self.log(job)
        attempts = self.folder / "attempts"
        assert not attempts.exists(), attempts.read_text()
        self.says(
            f"{self.num_ranks} ranks on two nodes, {self.steps} steps for {self.num:,} "
            f"conversations; nobody tried to leave the machine. Its log is `{self.place('N')}`."
        )

    def log(self, job: int) -> str:
        path = self.folder / self.place(job)
        return path.read_text(errors="replace") if path.exists() else ""

    def place(self, job: int | str) -> str:
        return f"results_modified/logs/job-{job}.log"

    # Chapter 6

    def inspect(self) -> None:
        self.chapter("6. Inspect the results")
        assert max(losses(self.results / "metrics.jsonl")) == self.steps
        saved = self.results.glob("checkpoint-*/adapter_model.safetensors")
        steps = sorted(int(path.parent.name.partition("-")[2]) for path in saved)
        assert steps == [step for step in (50, self.steps) if step <= self.steps]
        listed = ", ".join(f"`checkpoint-{step}`" for step in steps)
        self.says(f"{listed} in `results_modified/`, each with `adapter_model.safetensors`.")

    @property
    def adapter(self) -> Path:
        return self.results / f"checkpoint-{self.steps}" / "adapter_model.safetensors"

    def convert(self) -> None:
        """What `zero_to_fp32.py --merge_lora` does there."""
        words = [str(self.adapter.parent.relative_to(self.folder)), "finetuned.safetensors"]
        said = self.overland("convert", *words, "--to", "safetensors", "--merge-lora")
        merged = load_file(self.folder / "finetuned.safetensors")
        base = load_file(self.folder / "tiny/model.safetensors")
        learned = load_file(self.adapter)
        assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
        assert merged.keys() == base.keys()
        changed, furthest = 0, 0.0
        for name, tensor in merged.items():
            expected = base[name].double()
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
            if key.format("A") in learned:  # alpha = rank
                added = learned[key.format("B")].double() @ learned[key.format("A")].double()
                assert added.abs().max() > 0
                expected, changed = expected + added, changed + 1
            furthest = max(furthest, float((tensor.double() - expected).abs().max()))
        assert changed == 4  # q_proj and v_proj of two blocks
        assert furthest < 1e-6
        assert "logits" in said
        self.says(
            f"One file in float32: {changed} of {len(merged)} tensors are the model's plus B·A "
            f"of the adapter, to {furthest:.0e}, and the others are the model's."
        )

    def ask(self) -> None:
        prompt = "<s>[INST] Add 3 and 3. [/INST]"
        folder = str(self.adapter.parent.relative_to(self.folder))
        said = self.overland("generate", folder, "--prompt", prompt, "--num-tokens", "8")
        assert said.startswith(prompt)
        assert len(said) > len(prompt) + 1
        self.says("The base with the adapter of that checkpoint, which continues the text.")

    # The page

    def overland(self, *words: str, code: int = 0, as_json: bool = False, **env: str) -> str:
        """Runs a command; `$SCRATCH_ROOT` in it is what the shell would make of it."""
        typed = [word if "$" in word else shlex.quote(word) for word in ("overland", *words)]
        self.page += ["```", " ".join(typed), "```", ""]
        scratch = str(self.scratch)
        given = [word.replace("$SCRATCH_ROOT", scratch) for word in words]
        given += ["--json"] if as_json else []
        done = overland(*given, cwd=self.folder, code=code, SCRATCH_ROOT=scratch, **env)
        return done.stdout if as_json or not done.stderr else f"{done.stdout}\n{done.stderr}"

    def chapter(self, title: str) -> None:
        self.page += [f"## {title}", ""]

    def says(self, words: str) -> None:
        self.page += [words, ""]


HEAD = f"""\
# The walkthrough for Frontier, by Overland

Each chapter of the LoRA walkthrough for Frontier that docs/clusters.md mentions, with the \
commands that do the same here, run on a real Slurm whose nodes are all on one machine. \
`{MODEL}` is a tiny Llama with random weights, and the Hub a server on that machine; everything \
else, such as adapters, rates and batches, is the recipe's.
"""
HOW = "By `python -m tests.cluster.walkthrough` (part of `make prove-all`)."


def main(path: Path) -> None:
    cluster = Slurm()
    try:
        with tempfile.TemporaryDirectory() as folder:
            walk = Walk(cluster, Path(folder), conversations=1000, ranks_per_node=2)
            walk.all()
            path.write_text("\n".join([HEAD, *walk.page, HOW, ""]))
    finally:
        cluster.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
