"""Broken configs, and the kind and key of each problem; docs/evidence has what the user sees."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Broken:
    title: str
    text: str
    found: tuple[str, ...]
    """The kind of each problem, and its key."""
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    world_size: int = 8
    file: str = "run.toml"


BROKEN = [
    Broken(
        "A misspelled key",
        "[training]\nsteps = 100\nseq_lenn = 2048\n",
        ("invalid training.seq_lenn",),
    ),
    Broken(
        "A key in the wrong section",
        "[training]\nlr = 3e-4\n",
        ("invalid training.lr",),
    ),
    Broken(
        "A loss, which is an objective here",
        '[training]\nloss = "mse"\n',
        ("invalid training.loss",),
    ),
    Broken(
        "Keys of other trainers",
        "[training]\nnum_epochs = 3\ngradient_accumulation_steps = 4\nlearning_rate = 3e-4\n\n"
        "[optimizer]\nbatch_size = 8\n",
        (
            "invalid training.num_epochs",
            "invalid training.gradient_accumulation_steps",
            "invalid training.learning_rate",
            "invalid optimizer.batch_size",
            "invalid",
        ),
        arguments=("grad_accum=4",),
    ),
    Broken(
        "A misspelled section",
        '[job]\ndescription = "a test"\n\n[trainning]\nsteps = 100\nseq_len = 512\n',
        ("invalid [trainning]",),
    ),
    Broken(
        "A value of the wrong type",
        '[training]\nsteps = "many"\n',
        ("invalid training.steps",),
    ),
    Broken(
        "A word that is not among the choices",
        '[training]\ndtype = "bf16"\n',
        ("invalid training.dtype",),
    ),
    Broken(
        "A value out of bounds",
        "[optimizer]\nlr = -3e-4\nbeta2 = 1.0\n",
        (
            "invalid optimizer.lr",
            "invalid optimizer.beta2",
        ),
    ),
    Broken(
        "Degrees that do not multiply to the number of devices",
        "[parallelism]\ndata_parallel_shard_degree = 2\ntensor_parallel_degree = 2\n",
        ("invalid parallelism.data_parallel_shard_degree",),
    ),
    Broken(
        "A degree that does not divide the number of devices",
        "[parallelism]\ntensor_parallel_degree = 16\n",
        ("invalid parallelism.tensor_parallel_degree",),
    ),
    Broken(
        "A ZeRO stage that contradicts a degree",
        '[parallelism]\nsharding_stage = "zero0"\ndata_parallel_shard_degree = 8\n',
        ("invalid parallelism.sharding_stage",),
    ),
    Broken(
        "A global batch that does not divide",
        "[training]\nlocal_batch_size = 4\nglobal_batch_size = 100\n",
        ("invalid training.global_batch_size",),
    ),
    Broken(
        "A missing file",
        '[model]\nhf_assets_path = "./assets/Llama-3.1-8B"\n',
        ("missing model.hf_assets_path",),
    ),
    Broken(
        "A dataset that is not on this machine",
        '[training]\ndataset = "c4"\n',
        ("missing training.dataset",),
    ),
    Broken(
        "A misspelled dataset",
        '[training]\ndataset = "stdlb"\n',
        ("invalid training.dataset",),
    ),
    Broken(
        "An unknown flavor",
        '[model]\nname = "llama3"\nflavor = "8b"\n',
        ("invalid model.flavor",),
    ),
    Broken(
        "A backend that this torch build lacks",
        '[comm]\nbackend = "mpi"\n',
        ("invalid comm.backend",),
    ),
    Broken(
        "A lowest rate above the highest",
        "[optimizer]\nlr = 1e-4\n\n[lr_scheduler]\nmin_lr = 1e-3\n",
        ("invalid lr_scheduler.min_lr",),
    ),
    Broken(
        "Text without quotes",
        "[training]\nsteps = 100\ndataset = stdlib\n",
        ("invalid",),
    ),
    Broken(
        "A key given twice",
        "[training]\nsteps = 100\nseq_len = 512\nsteps = 200\n",
        ("invalid training.steps",),
    ),
    Broken(
        "A key given twice, in YAML",
        "training:\n  steps: 100\n  steps: 200\n",
        ("invalid training.steps",),
        file="run.yaml",
    ),
    Broken(
        "A bad override on the command line",
        "[training]\nsteps = 100\n",
        (
            "invalid training.step",
            "invalid compile.enable",
            "invalid",
        ),
        arguments=("training.step=20", "--compile.enable=maybe", "steps"),
    ),
    Broken(
        "A bad environment variable",
        "[training]\nsteps = 100\n",
        ("invalid comm.backend",),
        env={"COMM_BACKEND": "ncll"},
    ),
    Broken(
        "Several problems of different kinds at once",
        '[model]\nflavor = "8B"\nhf_asset_path = "./assets"\n\n[training]\nsteps = 1.5\n'
        "local_batch_size = 4\nglobal_batch_size = 100\n\n[parallelism]\n"
        'tensor_parallel_degree = 3\n\n[job]\ncustom_import = "my_modles"\n',
        (
            "invalid model.hf_asset_path",
            "invalid training.steps",
            "invalid parallelism.tensor_parallel_degree",
            "invalid job.custom_import",
        ),
    ),
]


SETTINGS: list[tuple[str, ...]] = [
    ("invalid parallelism.data_parallel_shard_degree", "parallelism.data_parallel_shard_degree=0"),
    ("invalid parallelism.sharding_stage", "parallelism.sharding_stage=zero3",
     "parallelism.data_parallel_replicate_degree=2"),
    ("invalid parallelism.sharding_stage", "parallelism.sharding_stage=zero2",
     "parallelism.fsdp_reshard_after_forward=always"),
    ("invalid parallelism.sharding_stage", "parallelism.sharding_stage=zero3_hybrid",
     "parallelism.data_parallel_shard_degree=4"),
    ("invalid training.global_batch_size", "training.global_batch_size=0"),
    ("invalid training.global_batch_size", "training.global_batch_size=3"),
    ("invalid training.global_batch_size", "training.global_batch_size=24",
     "training.local_batch_size=32"),
    ("invalid lr_scheduler.min_lr", "lr_scheduler.min_lr=1.0"),
    ("invalid optimizer.bf16_moments", "optimizer.bf16_moments=true", "training.dtype=float64"),
    ("invalid activation_checkpoint.selective_ac_option", "activation_checkpoint.mode=selective",
     "activation_checkpoint.selective_ac_option=ops"),
    ("invalid activation_checkpoint.selective_ac_option", "activation_checkpoint.mode=selective",
     "activation_checkpoint.selective_ac_option='2'", "parallelism.tensor_parallel_degree=2",
     "compile.enable=true"),
    ("invalid model.name", "model.name=lama3"),
    ("invalid model.overrides.hiden_size", "model.overrides.hiden_size=64"),
    ("invalid model.overrides.rms_norm_eps", "model.overrides.rms_norm_eps=0"),
    ("invalid training.dataset", "training.dataset=~"),
    ("invalid training.dataset", "training.dataset=run.toml"),
    ("invalid validation.dataset", "validation.enable=true", "validation.dataset=[]"),
    ("missing validation.sets.c4.path", "validation.enable=true",
     "validation.sets.c4.path=/nowhere"),
    ("missing validation.sets.books", "validation.enable=true", "validation.sets.books.freq=5"),
    ("invalid validation.sets.a/b", "validation.enable=true",
     "validation.sets.a/b.dataset=stdlib_heldout"),
    ("invalid validation.sets.stdlib_heldout.steps", "validation.enable=true",
     "validation.sets.stdlib_heldout.steps=0"),
    ("invalid validation.sets.stdlib_heldout.sequences", "validation.enable=true",
     "validation.sets.stdlib_heldout.steps=2", "validation.sets.stdlib_heldout.sequences=9"),
    ("invalid validation.sequences", "validation.enable=true", "validation.steps=2",
     "validation.sequences=9"),
    ("note", "data.holdout=0.1"),
    ("note", "data.holdout=0.1", "validation.enable=true", "validation.dataset=stdlib_heldout"),
    ("invalid validation.sets.x.dataset", "validation.enable=true",
     "validation.sets.x.dataset=stdlib_heldout", "validation.sets.x.path=."),
    ("note validation.sets.x.freq", "validation.enable=true",
     "validation.sets.x.dataset=stdlib_heldout", "training.steps=500",
     "validation.sets.x.freq=600"),
    ("invalid validation.sets", "validation.sets.x.dataset=stdlib_heldout"),
    ("missing model.config", "model.config=missing.json"),
    ("invalid checkpoint.resume", "checkpoint.resume=atuo"),
    ("missing checkpoint.initial_load_path", "checkpoint.initial_load_path=weights"),
    ("missing data.datasets.c4", "data.datasets.c4=nowhere"),
    ("missing training.dataset_path", "training.dataset_path=rum.toml"),
    ("missing validation.dataset", "validation.enable=true",
     'validation.dataset=["stdlib_heldout", "books"]'),
    ("invalid model.freeze", 'model.freeze=["embed_tokens"]'),
    ("invalid model.freeze", 'model.freeze=["*.q_proj.*", "layers.0.*"]'),
    ("invalid model.freeze", 'model.freeze=["model.*", "lm_head.*"]'),
    ("invalid training.seq_len", "training.seq_len=126", "parallelism.context_parallel_degree=2",
     "parallelism.tensor_parallel_degree=2"),
    ("invalid checkpoint.last_save_in_hf", "model.overrides.norm_type=layernorm",
     "checkpoint.last_save_in_hf=true"),
    ("invalid training.epochs", "training.epochs=2", "training.steps=20"),
    ("invalid lr_scheduler.warmup_ratio", "lr_scheduler.warmup_ratio=0.1",
     "lr_scheduler.warmup_steps=5"),
    ("invalid training.epochs", "training.epochs=2", 'data.sources.a.dataset="stdlib"',
     "data.sources.stdlib={}"),
    ("invalid training.epochs", "training.epochs=2", 'data.mixture="documents"'),
    ("invalid training.epochs", "training.epochs=2", 'training.dataset="random"'),
]  # fmt: skip
"""Settings that do not fit, on the command line of an empty config for 8 devices: the kind and
key of the one problem, and the settings."""
