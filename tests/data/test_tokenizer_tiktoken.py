import base64
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_encoders import LONG_BLANK, SPLIT, cut_long_blanks, llama3_specials
from overland.errors import DataError
from tests.data.tokenizer_folders import TEXTS, byte_level_bpe, write_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_ranks(tmp_path)
    return tmp_path


@pytest.fixture
def peer(folder: Path) -> tiktoken.Encoding:
    ranks = load_tiktoken_bpe(str(folder / "tokenizer.model"))
    return tiktoken.Encoding("peer", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})


def test_ids_are_those_of_tiktoken(folder: Path, peer: tiktoken.Encoding) -> None:
    tokenizer = Tokenizer(folder)
    assert [tokenizer.encode(text) for text in TEXTS] == [
        peer.encode_ordinary(text) for text in TEXTS
    ]


def test_the_same_model_as_tokenizer_json_gives_the_same_ids(folder: Path, tmp_path: Path) -> None:
    library = byte_level_bpe()
    library.add_special_tokens(list(llama3_specials(600).values()))
    (tmp_path / "hf").mkdir()
    library.save(str(tmp_path / "hf" / "tokenizer.json"))
    ours, other = Tokenizer(folder), Tokenizer(tmp_path / "hf")
    for text in TEXTS:
        assert ours.encode(text) == other.encode(text)
    assert ours.specials == other.specials
    assert (ours.bos_id, ours.eos_id) == (other.bos_id, other.eos_id)
    assert ours.vocab_size == other.vocab_size
    ids = ours.encode(TEXTS[6])
    assert ours.pieces(ids) == other.pieces(ids)


def test_special_tokens_have_the_ids_that_llama_3_gives_them() -> None:
    names = llama3_specials(128_000)
    assert list(names) == list(range(128_000, 128_256))
    assert len(set(names.values())) == 256
    assert names[128_000] == "<|begin_of_text|>"
    assert names[128_001] == "<|end_of_text|>"
    assert names[128_004] == "<|finetune_right_pad_id|>"
    assert names[128_006] == "<|start_header_id|>"
    assert names[128_007] == "<|end_header_id|>"
    assert names[128_008] == "<|eom_id|>"
    assert names[128_009] == "<|eot_id|>"
    assert names[128_010] == "<|python_tag|>"
    assert names[128_002] == "<|reserved_special_token_0|>"
    assert names[128_005] == "<|reserved_special_token_2|>"
    assert names[128_255] == "<|reserved_special_token_247|>"


def test_text_is_cut_only_within_very_long_blanks() -> None:
    ordinary = "word " * LONG_BLANK + " " * (LONG_BLANK - 1) + "end"
    assert cut_long_blanks(ordinary) == [ordinary]
    for before in (0, 1, LONG_BLANK - 1):
        text = "a" * before + "\u3000 \t" * LONG_BLANK + "z"
        parts = cut_long_blanks(text)
        assert "".join(parts) == text
        blanks = [len(part) - len(part.strip()) for part in parts]
        assert LONG_BLANK <= max(blanks) <= 2 * LONG_BLANK


def test_long_text_without_such_blanks_is_tiktokens_own(
    folder: Path, peer: tiktoken.Encoding
) -> None:
    text = "x" * (2 * LONG_BLANK) + "\n" + "中文" * LONG_BLANK + " " * (LONG_BLANK - 1) + "word"
    assert Tokenizer(folder).encode(text) == peer.encode_ordinary(text)


def test_ranks_of_another_family_are_refused(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [i.to_bytes(3, "big") for i in range(200_000 - 256)]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    with pytest.raises(DataError, match=r"the 200,000 ranks of Llama 4, .*tokenizer\.json"):
        Tokenizer(tmp_path)
