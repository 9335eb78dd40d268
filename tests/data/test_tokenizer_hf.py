import base64
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from overland.apps.evaluation.prompts import encode_prompt
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_encoders import SPLIT
from overland.errors import DataError
from tests.data.tokenizer_folders import CORPUS, TEXTS, byte_level_bpe, write_hf, write_unigram


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hf(tmp_path)
    return tmp_path


def configure(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def edit(folder: Path, **values: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_ids_are_those_of_transformers(folder: Path) -> None:
    peer = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    for text in TEXTS:
        ids = peer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    assert tokenizer.eos_id == peer.eos_token_id
    assert tokenizer.vocab_size == len(peer)


def test_a_file_that_truncates_pads_or_drops_out_does_so_not_here(folder: Path) -> None:
    expected = [ids.tolist() for ids in Tokenizer(folder).encode_documents(TEXTS)]
    library = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=4)
    library.model.dropout = 0.5
    library.save(str(folder / "tokenizer.json"))
    assert [ids.tolist() for ids in Tokenizer(folder).encode_documents(TEXTS)] == expected


def test_an_end_that_the_file_calls_ordinary_is_special_all_the_same(folder: Path) -> None:
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder, added_tokens=[token | {"special": False} for token in tokens])
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_id not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"


def test_added_tokens_that_are_ordinary_are_found_in_text(folder: Path) -> None:
    library = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([AddedToken("<think>", special=False)])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("<think>") == [tokenizer.vocab_size - 1]
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "a<think>b"


def test_a_model_that_holds_its_special_tokens_as_pieces_does_not_find_them(tmp_path: Path) -> None:
    """As T5's: here even `encode_special_tokens` leaves </s> to the lattice, which likes it."""
    write_unigram(tmp_path)
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.vocab_size())]
    library = HFTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    assert 2 in library.encode("a</s>b").ids

    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    ids = tokenizer.encode("a</s>b <s>")
    assert not {1, 2} & set(ids)
    assert tokenizer.decode(ids) == "a</s>b <s>"
    assert "".join(tokenizer.pieces(ids)) == " a</s>b <s>"


@pytest.mark.parametrize("form", [str, lambda name: {"content": name, "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_bos_and_eos_are_those_that_the_folder_names(folder: Path, form: Any, file: str) -> None:
    library = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<begin>", "<end>"])
    library.save(str(folder / "tokenizer.json"))
    configure(folder)
    words = {"bos_token": form("<begin>"), "eos_token": form("<end>")}
    (folder / file).write_text(json.dumps(words))
    tokenizer = Tokenizer(folder, add_bos=True)
    begin, end = tokenizer.specials["<begin>"], tokenizer.specials["<end>"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (begin, end)
    assert tokenizer.encode_documents([""])[0].tolist() == [begin, end]


@pytest.mark.parametrize(
    ("post_processor", "config", "adds"),
    [
        (True, {}, True),
        (True, {"add_bos_token": False}, False),
        (False, {}, False),
        (False, {"add_bos_token": True}, True),
        (False, {"add_bos_token": "yes"}, False),
        (True, {"bos_token": None, "eos_token": "<|endoftext|>"}, False),
    ],
)
def test_bos_comes_by_the_post_processor_or_by_the_config(
    folder: Path, post_processor: bool, config: dict[str, Any], adds: bool
) -> None:
    library = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<s>"])
    if post_processor:
        library.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
        )
    library.save(str(folder / "tokenizer.json"))
    configure(folder, **config)
    tokenizer = Tokenizer(folder)
    assert tokenizer.add_bos == adds
    (ids,) = tokenizer.encode_documents(["text"])
    assert ids.tolist()[:-1] == [tokenizer.bos_id] * adds + tokenizer.encode("text")
    assert tokenizer.bos_because


def test_a_family_without_bos_says_so_by_null(folder: Path) -> None:
    library = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<s>"])
    library.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).bos_id is not None
    configure(folder, bos_token=None, eos_token="<|endoftext|>")
    assert Tokenizer(folder).bos_id is None


def test_an_end_that_is_nowhere_named_is_asked_for(folder: Path) -> None:
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    configure(folder)
    with pytest.raises(
        DataError, match=r"no end-of-document token: name one as eos_token .*--no-eos"
    ):
        Tokenizer(folder)
    bare = pickle.loads(pickle.dumps(Tokenizer(folder, add_eos=False)))
    assert bare.eos_id is None
    assert bare.encode_documents(["a train"])[0].tolist() == encode_prompt(bare, "a train")
    with pytest.raises(DataError, match="no BOS or EOS token to begin an empty prompt"):
        encode_prompt(bare, "")
    for wrong in (7, ["</s>"], {"content": 7}):
        configure(folder, eos_token=wrong)
        with pytest.raises(DataError, match=r" as eos_token; expected the text of a token"):
            Tokenizer(folder)
    configure(folder, eos_token="<end>")
    with pytest.raises(DataError, match="names '<end>' as eos_token, but its tokenizer has no"):
        Tokenizer(folder)


def test_the_vocabulary_reaches_to_the_largest_id(folder: Path) -> None:
    """An embedding needs rows for holes as well, which a count of tokens leaves out."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder, added_tokens=[*tokens, tokens[0] | {"id": 700, "content": "<far>"}])
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == 1 + max(tokenizer.specials.values())
    assert tokenizer.encode_documents(CORPUS)


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"x" * 1000 + b"\0").decode()
X = {"SpecialToken": {"id": "X", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing", "single": [X] * 200, "pair": [],
    "special_tokens": {"X": {"id": "X", "ids": [0] * 200, "tokens": ["a"] * 200}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"normalizer": replace({"String": "a"}, "a" * 10**5)}, "100,000 times as long"),
        ({"normalizer": sequence(*[replace({"String": "a"}, "aa")] * 9)}, "512 times"),
        ({"normalizer": sequence(*[replace({"Regex": "(?=a)"}, "a")] * 9)}, "512 times"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**5}}, "times as long"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "1,000 times"),
        ({"decoder": replace({"String": "a"}, "a" * 10**5)}, "its decoder"),
        ({"post_processor": TEMPLATE}, "adds 40,000 tokens"),
        ({"post_processor": {**TEMPLATE, "single": [TEXT] * 3}}, "writes every text 3 times"),
        ({"pre_tokenizer": SLOW}, "could take forever to match"),
        ({"normalizer": replace({"Regex": r"(?<x>a\g<x>*)*b"}, "")}, "could take forever"),
        ({"normalizer": replace({"Regex": "((?:a*)?)+b"}, "")}, "could take forever to match"),
    ],
)
def test_rules_that_multiply_a_text_or_never_end_are_refused(
    folder: Path, rules: dict[str, Any], says: str
) -> None:
    edit(folder, **rules)
    with pytest.raises(DataError, match=says):
        Tokenizer(folder)


def test_expressions_of_real_tokenizers_are_taken(folder: Path) -> None:
    for pattern in (SPLIT, r"\d{1,3}(?=(?:\d{3})*\b)", r" ?[^(\s|[.,!?…])]+", "(?:a+b)*c", " {2,}"):
        edit(folder, normalizer=replace({"Regex": pattern}, "▁"))
        Tokenizer(folder)


def test_a_panic_of_the_library_is_one_sentence(folder: Path) -> None:
    """What it prints by itself still goes to stderr."""
    edit(folder, pre_tokenizer={**SLOW, "pattern": {"Regex": r"(\h+)+z"}})
    with pytest.raises(DataError, match="its library failed with it"):
        Tokenizer(folder).encode("a" * 40)
