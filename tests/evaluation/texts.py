"""A tiny model of text, as Hugging Face stores one, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overland.apps.data.tokenizer_training import train_tokenizer
from tests.data.chats import PLAIN_CHATML, ROLES, write_tokenizer
from tests.jobs import write_model

CORPUS = Path(json.__file__).with_name("decoder.py").read_text()


def write_text_model(folder: Path, **changes: Any) -> Path:
    write_model(folder, **{"initializer_range": 0.2, "vocab_size": 300, **changes})
    train_tokenizer([CORPUS], 300, folder / "tokenizer.json")
    return folder


def write_chat_model(folder: Path, **changes: Any) -> Path:
    """The same, which talks in ChatML."""
    write_model(folder, **{"initializer_range": 0.2, "vocab_size": 640, **changes})
    write_tokenizer(folder, **ROLES["chatml"], chat_template=PLAIN_CHATML)
    return folder
