"""Broken configs and what the user sees: the text of each, and the exact lines."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Broken:
    title: str
    text: str
    says: str
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    world_size: int = 8
    file: str = "run.toml"


BROKEN = [
    Broken(
        "A misspelled key",
        "[training]\nsteps = 100\nseq_lenn = 2048\n",
        "run.toml:3: training.seq_lenn = 2048: unknown key; did you mean training.seq_len?",
    ),
    Broken(
        "A key in the wrong section",
        "[training]\nlr = 3e-4\n",
        "run.toml:2: training.lr = 0.0003: unknown key; did you mean optimizer.lr?",
    ),
    Broken(
        "A loss, which is an objective here",
        '[training]\nloss = "mse"\n',
        'run.toml:2: training.loss = "mse": unknown key; did you mean training.objective?',
    ),
    Broken(
        "Keys of other trainers",
        "[training]\nnum_epochs = 3\ngradient_accumulation_steps = 4\nlearning_rate = 3e-4\n\n"
        "[optimizer]\nbatch_size = 8\n",
        "run.toml:2: training.num_epochs = 3: unknown key; set training.epochs for a single "
        "source, or training.steps for a mixture. Data is read repeatedly; "
        "data.sources.NAME.max_epochs limits how often\n"
        "run.toml:3: training.gradient_accumulation_steps = 4: unknown key; it follows from the "
        "batch size: set training.global_batch_size = passes × local_batch_size × data-parallel "
        "devices\n"
        "run.toml:4: training.learning_rate = 0.0003: unknown key; set optimizer.lr\n"
        "run.toml:7: optimizer.batch_size = 8: unknown key; set training.local_batch_size "
        "(sequences per device and pass), or training.global_batch_size (per step)\n"
        'command line: "grad_accum=4": no such setting; it follows from the batch size: set '
        "training.global_batch_size = passes × local_batch_size × data-parallel devices",
        arguments=("grad_accum=4",),
    ),
    Broken(
        "A misspelled section",
        '[job]\ndescription = "a test"\n\n[trainning]\nsteps = 100\nseq_len = 512\n',
        "run.toml:4: [trainning]: unknown section; did you mean [training]?",
    ),
    Broken(
        "A value of the wrong type",
        '[training]\nsteps = "many"\n',
        'run.toml:2: training.steps = "many": expected a positive whole number',
    ),
    Broken(
        "A word that is not among the choices",
        '[training]\ndtype = "bf16"\n',
        'run.toml:2: training.dtype = "bf16": expected one of "float32", "bfloat16" or "float64"; '
        'did you mean "bfloat16"?',
    ),
    Broken(
        "A value out of bounds",
        "[optimizer]\nlr = -3e-4\nbeta2 = 1.0\n",
        "run.toml:2: optimizer.lr = -0.0003: expected a number, 0 or more\n"
        "run.toml:3: optimizer.beta2 = 1.0: expected a number from 0 to below 1",
    ),
    Broken(
        "Degrees that do not multiply to the number of devices",
        "[parallelism]\ndata_parallel_shard_degree = 2\ntensor_parallel_degree = 2\n",
        "run.toml:2: parallelism.data_parallel_shard_degree = 2: the degrees multiply to 4 (shard "
        "2 × tensor 2), but there are 8 devices; parallelism.data_parallel_shard_degree = 4 would "
        "fit",
    ),
    Broken(
        "A degree that does not divide the number of devices",
        "[parallelism]\ntensor_parallel_degree = 16\n",
        "run.toml:2: parallelism.tensor_parallel_degree = 16: the degrees multiply to 16, which "
        "does not divide 8 devices; parallelism.tensor_parallel_degree = 8 would fit",
    ),
    Broken(
        "A ZeRO stage that contradicts a degree",
        '[parallelism]\nsharding_stage = "zero0"\ndata_parallel_shard_degree = 8\n',
        'run.toml:2: parallelism.sharding_stage = "zero0": replicates everything, but '
        "data_parallel_shard_degree = 8 shards; remove one of the two",
    ),
    Broken(
        "A global batch that does not divide",
        "[training]\nlocal_batch_size = 4\nglobal_batch_size = 100\n",
        "run.toml:3: training.global_batch_size = 100: expected a multiple of 32 "
        "(local_batch_size 4 × data-parallel degree 8); the nearest are 96 and 128",
    ),
    Broken(
        "A missing file",
        '[model]\nhf_assets_path = "./assets/Llama-3.1-8B"\n',
        'run.toml:2: model.hf_assets_path = "./assets/Llama-3.1-8B": no such file or folder; '
        "`overland fetch model NAME` fetches one",
    ),
    Broken(
        "A dataset that is not on this machine",
        '[training]\ndataset = "c4"\n',
        'run.toml:2: training.dataset = "c4": not on this machine (torchtitan\'s name for a '
        "public dataset); `overland fetch dataset allenai/c4 --include 'en/c4-train.*' --to "
        "./data/c4` fetches it, or set data.datasets.c4 or training.dataset_path to a folder",
    ),
    Broken(
        "A misspelled dataset",
        '[training]\ndataset = "stdlb"\n',
        'run.toml:2: training.dataset = "stdlb": no such dataset; expected stdlib, stdlib_heldout, '
        'docstrings, random, shapes, shapes_heldout or a folder in ./data; did you mean "stdlib"?',
    ),
    Broken(
        "An unknown flavor",
        '[model]\nname = "llama3"\nflavor = "8b"\n',
        "run.toml:3: model.flavor = \"8b\": model 'llama3' has no flavor '8b'; did you mean '8B'?",
    ),
    Broken(
        "A backend that this torch build lacks",
        '[comm]\nbackend = "mpi"\n',
        'run.toml:2: comm.backend = "mpi": this build of torch (TORCH) has gloo, not mpi; build '
        "torch from source with MPI, or start with mpirun and nccl or gloo",
    ),
    Broken(
        "A lowest rate above the highest",
        "[optimizer]\nlr = 1e-4\n\n[lr_scheduler]\nmin_lr = 1e-3\n",
        "run.toml:5: lr_scheduler.min_lr = 0.001: expected at most the peak learning rate "
        "(optimizer.lr = 0.0001)",
    ),
    Broken(
        "Text without quotes",
        "[training]\nsteps = 100\ndataset = stdlib\n",
        'run.toml:3: not valid TOML, text needs quotes: dataset = "stdlib"',
    ),
    Broken(
        "A key given twice",
        "[training]\nsteps = 100\nseq_len = 512\nsteps = 200\n",
        "run.toml:4: training.steps: given twice; first on line 2",
    ),
    Broken(
        "A key given twice, in YAML",
        "training:\n  steps: 100\n  steps: 200\n",
        "run.yaml:3: training.steps: given twice; first on line 2",
        file="run.yaml",
    ),
    Broken(
        "A bad override on the command line",
        "[training]\nsteps = 100\n",
        "command line: training.step = 20: unknown key; did you mean training.steps?\n"
        'command line: compile.enable = "maybe": expected true or false or "auto"\n'
        'command line: "steps": expected section.key=value, such as training.steps=20; did you '
        "mean training.steps?",
        arguments=("training.step=20", "--compile.enable=maybe", "steps"),
    ),
    Broken(
        "A bad environment variable",
        "[training]\nsteps = 100\n",
        'environment COMM_BACKEND: "ncll": expected one of "auto", "nccl", "gloo", "mpi" or '
        '"nvshmem"; did you mean "nccl"?',
        env={"COMM_BACKEND": "ncll"},
    ),
    Broken(
        "Several problems of different kinds at once",
        '[model]\nflavor = "8B"\nhf_asset_path = "./assets"\n\n[training]\nsteps = 1.5\n'
        "local_batch_size = 4\nglobal_batch_size = 100\n\n[parallelism]\n"
        'tensor_parallel_degree = 3\n\n[job]\ncustom_import = "my_modles"\n',
        'run.toml:3: model.hf_asset_path = "./assets": unknown key; did you mean '
        "model.hf_assets_path?\n"
        "run.toml:6: training.steps = 1.5: expected a positive whole number\n"
        "run.toml:11: parallelism.tensor_parallel_degree = 3: the degrees multiply to 3, which "
        "does not divide 8 devices; parallelism.tensor_parallel_degree = 2 would fit\n"
        'run.toml:14: job.custom_import = "my_modles": no such module in this folder or among the '
        "installed packages",
    ),
]
