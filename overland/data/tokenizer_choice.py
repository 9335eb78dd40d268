"""Chooses the tokenizer of a run, and whether its documents begin with BOS and end with EOS, and
refuses a corpus that was made with another tokenizer or another policy.

The tokenizer is the model's own, or one that is trained on the text; a built corpus has its own. If
the config does not specify BOS and EOS, the run that is resumed, an existing corpus, or the
tokenizer itself decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from overland.config.schema import Data as Settings
from overland.config.schema import JobConfig
from overland.data.corpora import Preparer
from overland.data.corpus import Corpus
from overland.data.layout import CorpusLayout, read_layout
from overland.data.plan import kept_plan
from overland.data.sampler import AnyCorpus
from overland.data.sft import tokenizer_for_chats
from overland.data.tokenizer import UNKNOWN, Policy, Tokenizer
from overland.data.wanted import WantedSource
from overland.errors import DataError
from overland.plugins import plugin
from overland.run_folder import TOKENIZER

OF_TRAINING = "that of the training data"


def tokenizer_for(
    config: JobConfig,
    wanted: Mapping[str, WantedSource],
    vocab_size: int | None,
    preparer: Preparer,
) -> Tokenizer | None:
    """Opens the model's own tokenizer, or one trained on the training text, in `data.folder`."""
    opened = partial(open_tokenizer, config=config, wanted=wanted, preparer=preparer)
    if config.model.hf_assets_path is not None:
        return opened(Path(config.model.hf_assets_path).expanduser())
    if preparer.tokenizer is not None and preparer.tokenizer.is_dir():
        return opened(preparer.tokenizer)  # adding a source does not change it
    train = plugin("tokenizer_training").trained_tokenizer
    made = partial(train, config, wanted, vocab_size, preparer.report, preparer.trains)
    path = preparer.once(made)
    return opened(Path(path)) if path else None


def open_tokenizer(
    path: Path, config: JobConfig, wanted: Mapping[str, WantedSource], preparer: Preparer
) -> Tokenizer:
    """Opens a tokenizer with the policy of the config, of the run that is resumed, of a built
    corpus, or its own, in this order."""
    if config.sft.shape != "off":
        return tokenizer_for_chats(config)
    asked = asked_policy(config)
    built, folder = preparer.once(partial(_built_policy, wanted))
    known = {"as this run began": preparer.policy, f"as {folder} was built": built}
    ends = (one.add_eos for one in (asked, *known.values()) if one.add_eos is not None)
    tokenizer = Tokenizer(path, add_bos=asked.add_bos, add_eos=next(ends, True))
    begins = ((why, one.add_bos) for why, one in known.items() if one.add_bos is not None)
    because, add_bos = next(begins, ("", None))
    if asked.add_bos is None and add_bos is not None and tokenizer.bos_id is not None:
        tokenizer = tokenizer.with_bos(add_bos)
        tokenizer.bos_because = because
    return tokenizer


def tokenizer_of(run: Path, data: Settings) -> Tokenizer:
    """Opens the tokenizer in a run's folder, with the policy of its documents."""
    kept = kept_policy(run)
    add_bos = kept.add_bos if data.add_bos is None else data.add_bos
    add_eos = kept.add_eos if data.add_eos is None else data.add_eos
    return Tokenizer(run / TOKENIZER, add_bos=add_bos, add_eos=add_eos is not False)


def one_tokenizer(
    given: Tokenizer | None,
    corpora: Mapping[str, AnyCorpus],
    asked: Policy = UNKNOWN,
    whose: str = "the model's",
) -> Tokenizer | None:
    """Returns the tokenizer that made all corpora; a built corpus has its own. `whose`: what errors
    call the given one."""
    made_by = {
        name: corpus.layout
        for name, corpus in corpora.items()
        if isinstance(corpus, Corpus) and corpus.layout.tokenizer is not None
    }
    if not made_by:
        return None
    first = next(iter(made_by))
    expected, fingerprint = f"that of {first}", made_by[first].tokenizer
    if given is not None:
        expected, fingerprint = whose, given.fingerprint
    for name, layout in made_by.items():
        _check_policy(name, layout, asked)
        if layout.tokenizer != fingerprint:
            if given is not None and layout.add_eos != given.add_eos:
                _refuse_other_kind(name, is_chat=layout.made_by is not None)
            raise DataError(
                f"{name} was made with another tokenizer than {expected}, or with another BOS and "
                f"EOS policy ({_words(layout)}): build it again with the same one"
            )
    layout = made_by[first]
    if given is None and layout.tokenizer_path is not None:
        return Tokenizer(layout.tokenizer_path, add_bos=layout.add_bos, add_eos=layout.add_eos)
    return given


def _refuse_other_kind(name: str, is_chat: bool) -> None:
    """Raises an error: documents and conversations are tokenized by different rules."""
    if is_chat:
        raise DataError(
            f"{name} is a corpus of conversations: set sft.shape to the one it was built with"
        )
    raise DataError(
        f"{name} is a corpus of documents, which are tokenized by other rules than sft.shape: "
        "provide its texts as records with a column text (JSON lines, parquet, …), or build it "
        "from such records with --sft shape=text"
    )


def asked_policy(config: JobConfig) -> Policy:
    """Returns the policy that the config sets for documents; conversations have none."""
    data = config.data
    return Policy(data.add_bos, data.add_eos) if config.sft.shape == "off" else UNKNOWN


def kept_policy(run: Path) -> Policy:
    """Returns the policy of an existing run, as far as it is known."""
    kept = kept_plan(run)
    found = (kept.get("add_bos"), kept.get("add_eos"))
    return Policy(*(one if isinstance(one, bool) else None for one in found))


def _built_policy(wanted: Mapping[str, WantedSource]) -> tuple[Policy, str]:
    """Returns the policy of the first built text corpus among the sources, and its folder."""
    for one in wanted.values():
        if folder := one.built:
            layout = read_layout(folder)
            if layout.kind == "text":
                return Policy(layout.add_bos, layout.add_eos), str(folder)
    return UNKNOWN, ""


def _check_policy(name: str, layout: CorpusLayout, asked: Policy) -> None:
    """Raises an error if the config sets another policy than that of a corpus."""
    for key, wanted in asked._asdict().items():
        if wanted is not None and getattr(layout, key) != wanted:
            raise DataError(
                f"data.{key} is {str(wanted).lower()}, but the documents of {name} are "
                f"{_words(layout)}: remove data.{key} to use them as they are, or build it again"
            )


def _words(layout: CorpusLayout) -> str:
    bos, eos = ("with" if added else "without" for added in (layout.add_bos, layout.add_eos))
    return f"{bos} BOS and {eos} EOS"
