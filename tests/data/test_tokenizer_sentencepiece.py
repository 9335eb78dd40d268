import json
from pathlib import Path

import pytest
import sentencepiece

from overland.data.tokenizer import Tokenizer
from tests.data.tokenizer_folders import TEXTS, write_sentencepiece


@pytest.fixture(params=["unigram", "bpe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_sentencepiece(tmp_path, request.param)
    return tmp_path


def test_ids_are_those_of_sentencepiece(folder: Path) -> None:
    peer = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    tokenizer = Tokenizer(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == peer.encode(text)
    framed = [ids.tolist() for ids in Tokenizer(folder, add_bos=True).encode_documents(TEXTS)]
    assert framed == peer.encode(TEXTS, add_bos=True, add_eos=True)
    assert tokenizer.vocab_size == peer.vocab_size()


def test_added_tokens_count_and_can_end_a_document(folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 600}))
    decoder = {"602": {"content": "<|im_end|>", "special": True}, "1": {"content": "<s>"}}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 602, 603)
    assert tokenizer.pieces([600, 601, 602]) == ["<|im_start|>", "\ufffd", "<|im_end|>"]
    ids = tokenizer.encode_documents(["a<|im_end|>"])[0].tolist()
    assert ids.count(602) == 1
    assert tokenizer.decode([600, *ids]) == "a<|im_end|>"
