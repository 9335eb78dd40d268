from collections import Counter
from typing import get_args

import numpy as np
import pytest

from overland.data.pack import BestFit, Concatenated, Packing, cut, num_packed

SEQ_LEN = 16
LENGTHS = {
    "many": np.random.default_rng(0).integers(1, 60, 200),
    "few": np.array([5, 40, 1]),
    "one": np.array([1]),
    "long": np.array([1000]),
    "exact": np.array([SEQ_LEN + 1, SEQ_LEN, 2 * SEQ_LEN + 1]),
    "none": np.zeros(0, np.int64),
}


def every_token(packing: Packing, lengths: np.ndarray) -> list[list[tuple[int, int]]]:
    """Block by block, which token of which document stands where."""
    laid_out = cut(lengths, SEQ_LEN, packing, "pad")
    blocks: list[list[tuple[int, int]]] = [[] for _ in range(laid_out.num_blocks)]
    for row, document, start, stop in zip(
        *laid_out.pieces(np.arange(laid_out.num_blocks)), strict=True
    ):
        blocks[row] += [(int(document), i) for i in range(start, stop)]
    return blocks


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("packing", ["pack", "overflow", "best_fit"])
def test_every_token_is_there_once_and_where_cut_the_last_one_begins_the_next(
    packing: Packing, lengths: np.ndarray
) -> None:
    blocks = every_token(packing, lengths)
    laid_out = cut(lengths, SEQ_LEN, packing, "pad")
    shared = laid_out.shares_last(np.arange(laid_out.num_blocks))
    seen: Counter[tuple[int, int]] = Counter()
    for block, is_shared in zip(blocks, shared, strict=True):
        assert 0 < len(block) <= SEQ_LEN + 1
        seen.update(block[:-1] if is_shared else block)
    assert seen == Counter((d, i) for d, n in enumerate(lengths.tolist()) for i in range(n))
    pieces = laid_out.pieces(np.arange(laid_out.num_blocks))
    first = set(zip(pieces.document.tolist(), pieces.start.tolist(), strict=True))
    for block, is_shared in zip(blocks, shared, strict=True):
        assert not is_shared or block[-1] in first


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_trunc_keeps_the_beginning_of_every_document(lengths: np.ndarray) -> None:
    expected = [[(d, i) for i in range(min(n, SEQ_LEN + 1))] for d, n in enumerate(lengths)]
    assert every_token("trunc", lengths) == expected


def test_overflow_begins_a_block_with_every_document() -> None:
    for block in every_token("overflow", LENGTHS["many"]):
        assert len({document for document, _ in block}) == 1


def test_best_fit_cuts_only_what_is_longer_than_a_block() -> None:
    lengths = LENGTHS["many"]
    laid_out = BestFit(lengths, SEQ_LEN)
    pieces = laid_out.pieces(np.arange(laid_out.num_blocks))
    is_cut = (pieces.start > 0) | (pieces.stop < lengths[pieces.document])
    assert (lengths[pieces.document[is_cut]] > SEQ_LEN + 1).all()


def test_best_fit_needs_hardly_more_blocks_than_tokens_fill() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 5000)
    laid_out = BestFit(lengths, 255)
    assert laid_out.num_blocks < 1.02 * lengths.sum() / 256


@pytest.mark.parametrize("tokens", [0, 1, 2, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 5 * SEQ_LEN + 1])
def test_the_last_block_of_a_window_is_padded_or_dropped(tokens: int) -> None:
    lengths = np.array([tokens]) if tokens else np.zeros(0, np.int64)
    padded, dropped = (Concatenated(lengths, SEQ_LEN, policy) for policy in ("pad", "drop"))
    assert dropped.num_blocks == max(tokens - 1, 0) // SEQ_LEN
    assert padded.num_blocks == (max(1, -(-(tokens - 1) // SEQ_LEN)) if tokens else 0)
    for laid_out, policy in ((padded, "pad"), (dropped, "drop")):
        assert num_packed([tokens], SEQ_LEN, policy)[0] == laid_out.num_blocks


def test_packings_are_those_of_the_config() -> None:
    from overland.config.schema import Data

    assert set(get_args(Packing)) == set(get_args(Data.model_fields["packing"].annotation))
