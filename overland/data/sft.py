"""The source of fine-tuning data, as the keys of `[sft]` say: chooses the chat template, adds
`sft.new_tokens` to the tokenizer, and reads conversations as tokens with weights.

This is all that fine-tuning adds to the data: order, packing, ranks, resume, holdouts and the
ledger only know tokens and their channels, and nothing about chats.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from overland.config.schema import JobConfig
from overland.data.chat import GIVEN, ChatError, ChatTemplate, Undecided
from overland.data.conversations import Columns, Record, recognize
from overland.data.learned_tokens import NoTemplate, PairWriter, Skipped, Writer, encode
from overland.data.sources.source import Document, FileSource, Kind, Located, Source
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_files import DEFAULT, WITH_TOOLS, Beside, find_file, read_text
from overland.errors import DataError
from overland.plugins import plugin
from overland.words import any_of

LOOKED_AT = 64  # records read to detect what the columns hold
# Special tokens as most families of templates write them.
TOKEN_LIKE = re.compile(r"<\|[A-Za-z0-9_]{1,40}\|>|<(?:start|end)_of_turn>")
BUILT_IN = {name: Path(__file__).with_name(f"{name}.jinja") for name in ("chatml", "alpaca")}
"""Chat templates by name. The one called alpaca is the prompt of Stanford's Alpaca; the tokenizer
decides whether BOS precedes it."""


class ConversationSource(FileSource):
    """The conversations of a source of records, as tokens with weights."""

    kind: Kind = "tokens"

    def __init__(
        self, records: FileSource, shape: Columns, writer: Writer, first: Sequence[Record]
    ) -> None:
        """`first`: some of the records."""
        self.records, self.shape, self.writer = records, shape, writer
        self.first = [dict(record) for record in first]
        super().__init__(records.root, records.files, records.skip_bad)
        self.format, self.column, self.dtype = records.format, records.column, records.dtype
        self.columns, self.is_walked = records.columns, records.is_walked
        self.not_read, self.together = records.not_read, records.together
        self.channels, self.tokenizer = writer.channels, writer.tokenizer
        read = {key: value for key, value in asdict(shape).items() if value}
        self.made_by = {"columns": read, **writer.identity}
        """What determines the tokens besides the records: part of a corpus's fingerprint."""
        self.counts: Counter[str] = Counter()
        """How many conversations were left out or truncated, by what was done."""

    @property
    def notes(self) -> list[str]:
        notes: list[str] = plugin("chat_notes").notes_of(self, super().notes)
        return notes

    @property
    def num_bad(self) -> int:  # type: ignore[override]
        return self.records.num_bad

    def chunks(self) -> list[str]:
        return self.records.chunks()

    def num_bytes(self, chunk: str) -> int | None:
        return self.records.num_bytes(chunk)

    def depends_on(self) -> Sequence[str]:
        return self.records.depends_on()

    def files_of(self, chunk: str) -> list[str]:
        return self.records.files_of(chunk)

    def read(self, chunk: str) -> Iterator[Document]:
        self.records.skip_bad = self.skip_bad
        for number, record in enumerate(self.records.read(chunk)):
            assert isinstance(record, Mapping)
            try:
                arrays, what = self.writer.sample(record, self.shape)
            except Skipped as why:
                self.counts[str(why)] += 1
            except ChatError as error:
                where: object = f"{chunk}: record {number:,}"
                if isinstance(record, Located):
                    where = record.where
                if isinstance(error, Undecided):
                    raise DataError(f"{where}: {error}") from None
                self.records.bad(
                    f'{where}: {error} (to skip it, set data.bad_documents = "skip", or use '
                    "--skip-bad)"
                )
            else:
                self.counts.update(what)
                yield arrays


def conversations_of(source: Source, config: JobConfig, seq_len: int, column: str | None) -> Source:
    """Returns a source of records as a source of conversations. Sources of token ids (a built
    corpus, or a user-defined source) are returned unchanged."""
    if source.kind == "tokens":
        return source
    where = source.place
    if not isinstance(source, FileSource) or source.kind != "records":
        raise DataError(
            f"{where} has no records to fine-tune on (sft.shape): set training.dataset_path to "
            "JSON lines, CSV, parquet, Arrow or MDS with conversations or texts"
        )
    wanted = None if config.sft.shape == "auto" else config.sft.shape
    assert wanted != "off"
    pairs = config.preference.loss != "off"
    records: Any = list(islice(chain.from_iterable(map(source.read, source.chunks())), LOOKED_AT))
    source.num_bad = 0
    shape = recognize(where, records, wanted, column, pairs)
    writer = writer_for(config, seq_len)
    if writer.template is None and shape.shape in ("messages", "sharegpt", "instruction"):
        raise NoTemplate
    if shape.shape != "text" and config.data.add_bos is not None:
        raise DataError(
            "data.add_bos is only for texts; in conversations, the chat template writes BOS: "
            "remove data.add_bos"
        )
    return ConversationSource(source, shape, writer, records)


def writer_for(config: JobConfig, seq_len: int, tokenizer: Path | None = None) -> Writer:
    """Returns the writer that converts conversations to samples, as the config says. `tokenizer`:
    its path, if the config has none."""
    data = config.data
    opened = tokenizer_for_chats(config, tokenizer)
    template, tool_template = templates_of(config, opened)
    kind: Callable[..., Writer] = Writer
    if config.preference.loss != "off":
        kind = partial(PairWriter, settings=config.preference)
    return kind(
        opened,
        template,
        tool_template,
        config.sft,
        seq_len,
        opened.begins_with_bos if data.add_bos is None else data.add_bos,
        data.add_eos is not False,
        length_key="training.seq_len"
        if seq_len == config.training.seq_len
        else "validation.seq_len",
    )


def tokenizer_for_chats(config: JobConfig, path: Path | None = None) -> Tokenizer:
    """Opens the model's tokenizer with `sft.new_tokens`. It adds nothing around a text, which the
    writer does. Copies of it include the chat template in use."""
    given = config.model.hf_assets_path
    if given is not None:
        path = Path(given).expanduser()
    if path is None:
        raise DataError(
            "fine-tuning (sft.shape) needs the tokenizer of the model: set model.from to the "
            "model's folder, or model.hf_assets_path"
        )
    file = find_file(path)
    stamps = tuple((one, os.stat(one).st_mtime_ns) for one in [file, *Beside.of(file).files])
    return _opened(path, stamps, tuple(config.sft.new_tokens), _given_template(config))


@lru_cache(maxsize=4)  # sources are opened several times, and a large tokenizer takes a second
def _opened(
    path: Path, stamps: tuple[Any, ...], new_tokens: tuple[str, ...], template: str | None
) -> Tokenizer:
    tokenizer = Tokenizer(path, add_bos=False, add_eos=False, new_tokens=new_tokens)
    if template == read_text(BUILT_IN["alpaca"]) and tokenizer.begins_with_bos:
        template = "{{- bos_token -}}\n" + template
    if template is not None:
        tokenizer.chat_templates = {DEFAULT: template}
    return tokenizer


def _given_template(config: JobConfig) -> str | None:
    """Returns the template that `sft.chat_template` names, if any."""
    given = config.sft.chat_template
    if given is None:
        return None
    path = BUILT_IN.get(given) or Path(given).expanduser()
    if not path.is_file():
        raise DataError(
            f"sft.chat_template = {given!r}: there is no such file (built-in templates: "
            f"{any_of(list(BUILT_IN), 'and')})"
        )
    return read_text(path)


def templates_of(
    config: JobConfig, tokenizer: Tokenizer
) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Returns the chat template, and the one for conversations with tools if it is different."""
    default, with_tools = (_template(config, tokenizer, name) for name in (DEFAULT, WITH_TOOLS))
    is_built_in = config.sft.chat_template in BUILT_IN
    missing = unknown_tokens(default, tokenizer) if default is not None and is_built_in else []
    if missing:
        listed = ", ".join(json.dumps(name) for name in missing)
        raise DataError(
            f"{config.sft.chat_template} writes {any_of(missing, 'and')}, which this tokenizer "
            f"does not have: set sft.new_tokens = [{listed}]"
        )
    _require_effect(config, [one for one in (default, with_tools) if one is not None])
    return default, with_tools


def _require_effect(config: JobConfig, templates: Sequence[ChatTemplate]) -> None:
    """Raises an error for an option that no template reads."""

    def is_read(name: str) -> bool:
        return any(re.search(rf"\b{re.escape(name)}\b", one.source) for one in templates)

    asked = [
        f"template_options.{name}" for name in config.sft.template_options if not is_read(name)
    ]
    if config.sft.date is not None and not any(one.asks_for_date for one in templates):
        asked.append("date")
    if asked and templates:
        raise DataError(
            f"sft.{asked[0]} has no effect: {templates[0].whose} does not read it; remove it, or "
            "correct its name"
        )


def _template(config: JobConfig, tokenizer: Tokenizer, name: str) -> ChatTemplate | None:
    sft, source = config.sft, tokenizer.chat_templates.get(name)
    if source is None:
        return None
    if own := [name for name in GIVEN if name in sft.template_options]:
        raise DataError(
            f"sft.template_options.{own[0]} is reserved, since every template gets it: remove it"
        )
    whose = "the tokenizer's chat template"
    if sft.chat_template is not None:
        whose = f"the chat template {sft.chat_template}"
    allowed = sft.special_tokens_in_content
    if not isinstance(allowed, bool) and (unknown := set(allowed) - tokenizer.specials.keys()):
        raise DataError(
            f"sft.special_tokens_in_content: {sorted(unknown)[0]!r} is not a special token of this "
            "tokenizer: remove it, or add it to sft.new_tokens"
        )
    names = tokenizer.specials.keys() if allowed is True else allowed or ()
    day, options = _day(sft.date), sft.template_options
    template = ChatTemplate(
        source, tokenizer.specials, tokenizer.named, day, options, whose, frozenset(names)
    )
    template.check()
    return template


def end_of_turn(config: JobConfig, tokenizer: Tokenizer) -> int | None:
    """Returns the special token that ends an assistant's turn, where generation should stop."""
    template, _ = templates_of(config, tokenizer)
    if template is None:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        written = template.write(turns, [0, 1])
    except ChatError:  # it requires something else, such as a system turn
        return None
    ids, weights = encode(tokenizer, written)
    ends = [i for i in ids[weights > 0].tolist() if i in tokenizer.specials.values()]
    return ends[-1] if ends else None


def unknown_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    """Returns what looks like a special token in a template but is not a token."""
    names = dict.fromkeys(TOKEN_LIKE.findall(template.source))
    return [name for name in names if len(tokenizer.encode_pieces([name])[0]) > 1
            and name not in tokenizer.specials]  # fmt: skip


def _day(text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise DataError(f"sft.date = {text!r}: expected a date, such as 2026-07-01") from None
