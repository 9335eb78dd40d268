"""Config files of other trainers, translated to current keys before they are validated.

Start with `translate`, which recognizes whose file it is. Each dialect is a module that writes into
a `Draft`.
"""

from __future__ import annotations

from overland.apps.dialects.axolotl import is_axolotl, translate_axolotl
from overland.apps.dialects.draft import by_key
from overland.apps.dialects.stub import Stub, is_stub
from overland.apps.dialects.torchtitan import todays_key as todays_key
from overland.apps.dialects.torchtitan import translate_torchtitan
from overland.config.source import Entries, Translated


def translate(entries: Entries, shown: str, below: Entries, above: Entries) -> Translated:
    """Returns entries in current keys, notes on keys that were renamed or have no effect, and
    problems: keys that would train something else here than in the trainer the file is for.

    Args:
        entries: What was read.
        shown: Name of the place it was read from.
        below: Entries, in current keys, that these will override.
        above: Entries that will override these, untranslated.
    """
    first = Translated(entries, [], [])
    if is_stub(entries):
        first = Stub(entries, shown, above).translate()
    elif is_axolotl(entries):
        first = translate_axolotl(entries, shown, above)
    second = translate_torchtitan(first.entries, shown, below, above)
    return Translated(
        second.entries,
        first.notes + second.notes,
        first.problems + second.problems,
        first.routine | second.routine,
        first.about or second.about,
    )


# Names that other trainers have for what a key sets here: what to set -> the last parts of their
# keys, without _ and in lower case.
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
