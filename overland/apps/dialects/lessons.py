"""Names that other trainers have for what a key sets here, for the message about an unknown key."""

from __future__ import annotations

EPOCHS = (
    "set training.epochs for a single source, or training.steps for a mixture. Data is read "
    "repeatedly; data.sources.NAME.max_epochs limits how often"
)
ACCUMULATION = (
    "it follows from the batch size: set training.global_batch_size = passes × local_batch_size × "
    "data-parallel devices"
)

# The last part of a key, without _ and in lower case -> what to set instead.
LESSONS = {
    **dict.fromkeys(("epochs", "numepochs", "numtrainepochs", "maxepochs", "nepochs"), EPOCHS),
    **dict.fromkeys(
        ("gradaccum", "gradaccumsteps", "gradientaccumulation", "gradientaccumulationsteps",
         "accumulategradbatches", "accumulationsteps"),
        ACCUMULATION,
    ),
    **dict.fromkeys(("lr", "learningrate", "maxlr", "peaklr"), "set optimizer.lr"),
    **dict.fromkeys(
        ("batchsize", "microbatchsize", "perdevicetrainbatchsize", "trainmicrobatchsizepergpu"),
        "set training.local_batch_size (sequences per device and pass), or "
        "training.global_batch_size (per step)",
    ),
    **dict.fromkeys(
        ("globalbatch", "trainbatchsize", "totalbatchsize"), "set training.global_batch_size"
    ),
    **dict.fromkeys(
        ("maxsteps", "numsteps", "maxiters", "trainiters", "numtrainsteps", "iterations"),
        "set training.steps",
    ),
    "warmupratio": "set lr_scheduler.warmup_ratio",
    **dict.fromkeys(("r", "lorar"), "set lora.rank"),
    **dict.fromkeys(
        ("maxseqlength", "maxseqlen", "seqlength", "sequencelength", "blocksize", "contextlength",
         "maxlength"),
        "set training.seq_len",
    ),
    **dict.fromkeys(
        ("maxgradnorm", "gradclip", "clipgrad", "gradientclipval", "gradientclipping"),
        "set training.max_norm",
    ),
    **dict.fromkeys(
        ("fp16", "bf16", "precision", "mixedprecision", "torchdtype"),
        'set training.mixed_precision_param, for example to "bfloat16" or "float16"',
    ),
    **dict.fromkeys(
        ("gradientcheckpointing", "activationcheckpointing"),
        'set activation_checkpoint.mode, for example to "full"',
    ),
    **dict.fromkeys(("outputdir", "outdir", "savedir", "outputfolder"), "set job.dump_folder"),
    **dict.fromkeys(
        ("savesteps", "saveinterval", "saveevery", "savefreq"), "set checkpoint.interval"
    ),
    **dict.fromkeys(
        ("loggingsteps", "logevery", "loginterval", "logsteps"), "set metrics.log_freq"
    ),
    **dict.fromkeys(
        ("evalsteps", "evalinterval", "evalevery", "evalfreq"),
        "set validation.enable = true and validation.freq, or freq of a set in validation.sets",
    ),
    **dict.fromkeys(
        ("datapath", "trainfile", "datadir", "trainpath", "traindata"),
        "set training.dataset_path",
    ),
    "betas": "set optimizer.beta1 and optimizer.beta2",
}  # fmt: skip


def lesson(name: str) -> str:
    """Returns what to set instead of a key of another trainer; empty for unknown names."""
    return LESSONS.get(name.replace("_", "").replace("-", "").lower(), "")
