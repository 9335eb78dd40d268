"""Text comes in whole characters, and never with a part of a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest

from overland.apps.evaluation.generate import TextStream
from overland.data.tokenizer import Tokenizer
from tests.data.tokenizer_folders import TEXTS, write_bpe, write_hf, write_ranks, write_unigram

KINDS = {"hf": write_hf, "bpe": write_bpe, "unigram": write_unigram, "ranks": write_ranks}


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    KINDS[request.param](folder)
    return Tokenizer(folder, add_eos=False)


@pytest.mark.parametrize("split", [0, 1, 3, 20])
def test_pieces_make_the_text_and_are_whole_characters(tokenizer: Tokenizer, split: int) -> None:
    for text in TEXTS[:9]:
        ids = tokenizer.encode(text)[:300]
        before, after = ids[:split], ids[split:]
        if tokenizer.decode(before).endswith("\ufffd"):
            continue
        stream = TextStream(tokenizer, before)
        pieces = [stream.take([one]) for one in after]
        assert not any("\ufffd" in piece for piece in pieces)
        whole = "".join([*pieces, stream.finish()])
        assert whole == tokenizer.decode(after, after=before)
        at_once = TextStream(tokenizer, before)
        assert at_once.take(after) + at_once.finish() == whole


def test_bytes_that_are_no_character_come_at_the_end_or_once_others_follow(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("👩 a")
    first = next(i for i in range(1, len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    half = ids[:first]
    stream = TextStream(tokenizer)
    assert "".join(stream.take([one]) for one in half).count("\ufffd") == 0
    assert stream.finish() == tokenizer.decode(half)
    assert stream.finish() == ""
    stream = TextStream(tokenizer)
    endless = half[-1:] * 500
    said = "".join(stream.take([one]) for one in endless)
    assert len(said) > 400
    assert said + stream.finish() == tokenizer.decode(endless)


class Characters:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "stop", "wanted", "is_stopped"),
    [
        ("one two three", ["two"], "one ", True),
        ("one two three", ["tw", "one two"], "one ", True),
        ("one two three", ["never", "three!"], "one two three", False),
        ("aaab", ["aab"], "a", True),
        ("abababc", ["ababc"], "ab", True),
        ("stop", ["stop"], "", True),
        ("a\n\nb", ["\n\n"], "a", True),
        ("a\n", ["\n\n"], "a\n", False),
        ("", ["x"], "", False),
    ],
)
def test_a_text_ends_before_its_first_stop_string(
    text: str, stop: list[str], wanted: str, is_stopped: bool
) -> None:
    for size in (1, 2, 5, 100):
        stream = TextStream(Characters(), (), stop)  # type: ignore[arg-type]
        said = ""
        for start in range(0, len(text), size):
            said += stream.take([ord(one) for one in text[start : start + size]])
            assert wanted.startswith(said)
        assert said + stream.finish() == wanted
        assert stream.is_stopped == is_stopped
