"""Names that other trainers have for what a key sets here, for the message about an unknown key."""

from __future__ import annotations

from overland.apps.dialects.draft import by_key

# What to set -> the last parts of keys, without _ and in lower case.
LESSONS = by_key({
    "set training.epochs for a single source, or training.steps for a mixture. Data is read "
    "repeatedly; data.sources.NAME.max_epochs limits how often":
        "epochs numepochs numtrainepochs maxepochs nepochs",
    "it follows from the batch size: set training.global_batch_size = passes × local_batch_size × "
    "data-parallel devices":
        "gradaccum gradaccumsteps gradientaccumulation gradientaccumulationsteps "
        "accumulategradbatches accumulationsteps",
    "set optimizer.lr": "lr learningrate maxlr peaklr",
    "set training.local_batch_size (sequences per device and pass), or "
    "training.global_batch_size (per step)":
        "batchsize microbatchsize perdevicetrainbatchsize trainmicrobatchsizepergpu",
    "set training.global_batch_size": "globalbatch trainbatchsize totalbatchsize",
    "set training.steps": "maxsteps numsteps maxiters trainiters numtrainsteps iterations",
    "set lr_scheduler.warmup_ratio": "warmupratio",
    "set lora.rank": "r lorar",
    "set training.seq_len":
        "maxseqlength maxseqlen seqlength sequencelength blocksize contextlength maxlength",
    "set training.max_norm": "maxgradnorm gradclip clipgrad gradientclipval gradientclipping",
    'set training.mixed_precision_param, for example to "bfloat16" or "float16"':
        "fp16 bf16 precision mixedprecision torchdtype",
    'set activation_checkpoint.mode, for example to "full"':
        "gradientcheckpointing activationcheckpointing",
    "set job.dump_folder": "outputdir outdir savedir outputfolder",
    "set checkpoint.interval": "savesteps saveinterval saveevery savefreq",
    "set metrics.log_freq": "loggingsteps logevery loginterval logsteps",
    "set validation.enable = true and validation.freq, or freq of a set in validation.sets":
        "evalsteps evalinterval evalevery evalfreq",
    "set training.dataset_path": "datapath trainfile datadir trainpath traindata",
    "set optimizer.beta1 and optimizer.beta2": "betas",
})  # fmt: skip


def lesson(name: str) -> str:
    """Returns what to set instead of a key of another trainer; empty for unknown names."""
    return LESSONS.get(name.replace("_", "").replace("-", "").lower(), "")
