"""Masks mean what they say, in whatever form a backend gets them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from overland.models import DecoderConfig, ModelError, build_model
from overland.models import attention as attention_module
from overland.models.attention import (
    FEWEST_RUNS,
    Attention,
    build_mask,
    choose_form,
    run_starts,
    visible_keys,
)
from overland.models.init import init_weights

from .tiny import hf

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BATCH, HEADS, KV_HEADS, SEQ, DIM = 2, 4, 2, 24, 8


def inputs(num_queries: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, num_queries, DIM, dtype=torch.float64)
    k = torch.randn(BATCH, KV_HEADS, SEQ, DIM, dtype=torch.float64)
    return q, k, torch.randn_like(k)


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen_BQK: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * DIM**-0.5
    return scores.masked_fill(~seen_BQK[:, None], -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("window", [None, 1, 5, SEQ, 100])
@pytest.mark.parametrize("documents", [False, True])
def test_mask_equals_the_definition_pair_by_pair(window: int | None, documents: bool) -> None:
    numbers_BS = torch.tensor([[0] * 7 + [1] * 10 + [2] * 7, [4] * 20 + [5] * 4])
    seen_BQK = torch.zeros(BATCH, SEQ, SEQ, dtype=torch.bool)
    for b in range(BATCH):
        for i in range(SEQ):
            for j in range(i + 1):
                near = window is None or i - j < window
                same = not documents or numbers_BS[b, i] == numbers_BS[b, j]
                seen_BQK[b, i, j] = near and bool(same)
    q, k, v = inputs()
    mask = build_mask("auto", BATCH, SEQ, CPU, q.dtype, window, numbers_BS if documents else None)
    assert mask.form == ("dense" if documents or (window or SEQ) < SEQ else "causal")
    torch.testing.assert_close(
        Attention()(q, k, v, mask), by_hand(q, k, v, seen_BQK), atol=1e-12, rtol=0
    )


def test_queries_with_their_own_positions_see_what_they_saw_in_order() -> None:
    """What one context-parallel rank asks: some queries, moved, against all keys."""
    q, k, v = inputs()
    documents_BS = (torch.arange(SEQ) // 9).expand(BATCH, SEQ)
    whole = Attention()(q, k, v, build_mask("sdpa", BATCH, SEQ, CPU, q.dtype, 6, documents_BS))
    places_Q = torch.tensor([3, 4, 5, 18, 19, 20])
    pieces = [(3, 6), (18, 21)]
    part = build_mask("sdpa", BATCH, SEQ, CPU, q.dtype, 6, documents_BS, pieces)
    torch.testing.assert_close(Attention()(q[:, :, places_Q], k, v, part), whole[:, :, places_Q])


def flash_by_hand(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int,
    longest_k: int, window_size: tuple[int, int], **_: object,
) -> Tensor:  # fmt: skip
    """What flash attention documents: the last query of a run is at the place of its last key."""
    out = torch.zeros_like(q)
    pairs = zip(q_starts.tolist(), k_starts.tolist(), strict=True)
    for (q0, k0), (q1, k1) in itertools.pairwise(pairs):
        assert q1 - q0 <= longest_q
        assert k1 - k0 <= longest_k
        places_q, places_k = torch.arange(k1 - k0 - (q1 - q0), k1 - k0), torch.arange(k1 - k0)
        away = places_q[:, None] - places_k
        seen = (away >= 0) & ((window_size[0] < 0) | (away <= window_size[0]))
        rows = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out[q0:q1] = by_hand(*rows, seen[None])[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("pieces", [None, [(4, 8), (16, 20)], [(0, 4), (20, 24)], [(8, 12)]])
def test_flash_sees_in_pieces_of_a_row_what_a_dense_mask_sees(
    pieces: list[tuple[int, int]] | None, documents: bool, window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", flash_by_hand)
    q, k, v = inputs()
    if pieces:
        q = torch.cat([q[:, :, start:stop] for start, stop in pieces], dim=2)
    numbers_BS = torch.tensor([[0] * 7 + [1] * 10 + [2] * 7, [4] * 20 + [5] * 4])
    more = (window, numbers_BS if documents else None, pieces)
    dense = build_mask("sdpa", BATCH, SEQ, CPU, q.dtype, *more)
    monkeypatch.setattr(attention_module, "choose_form", lambda *_, **__: "varlen")
    flash = build_mask("flash", BATCH, SEQ, CPU, q.dtype, *more)
    torch.testing.assert_close(Attention()(q, k, v, flash), Attention()(q, k, v, dense))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_documents_in_a_row_equal_documents_alone(kind: str) -> None:
    window = {"sliding_window": 6}
    if kind.startswith("qwen"):
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    config = DecoderConfig.from_hf(hf(kind, **({} if kind == "llama" else window)))
    model = build_model(config).double()
    init_weights(model, seed=0)
    lengths = [5, 17, 1, 9]
    tokens_BS = torch.randint(0, 96, (1, sum(lengths)))
    documents_BS = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions_BS = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens_BS, positions_BS, documents_BS)
    alone = torch.cat([model(part) for part in tokens_BS.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-12, rtol=0)
    # Rotary positions are relative: counting on through the row gives the same.
    torch.testing.assert_close(model(tokens_BS, None, documents_BS), alone, atol=1e-9, rtol=0)
    assert (model(tokens_BS) - alone).abs().max() > 1e-3  # unmasked, it would be another model


def test_run_starts_are_padded_to_few_shapes() -> None:
    documents_BS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    # A new row starts a run though its document has the number of another row's.
    assert run_starts(documents_BS).tolist() == [0, 2, 5, 6, *[12] * (FEWEST_RUNS - 3)]
    assert run_starts(documents_BS).dtype == torch.int32
    each_its_own = torch.arange(300)[None]
    assert len(run_starts(each_its_own)) == 512 + 1
    assert len({len(run_starts(each_its_own.clamp(max=n))) for n in range(FEWEST_RUNS - 1)}) == 1


def test_visible_has_no_row_without_a_key() -> None:
    places = torch.arange(6)[None]
    assert visible_keys(places, places, None, None, window=1).sum(-1).eq(1).all()


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "asked", "sentence"),
    [
        ("flash", CPU, torch.bfloat16, {}, "'flash' needs a GPU, but the model runs on cpu"),
        ("cudnn", CPU, torch.bfloat16, {}, "'cudnn' needs a GPU"),
        ("flex", CPU, torch.float32, {}, "'flex' needs a GPU"),
        ("flash", CUDA, torch.float32, {}, "computes in float16 or bfloat16"),
        ("cudnn", CUDA, torch.bfloat16, {"documents": True}, "'cudnn' cannot mask documents"),
        ("cudnn", CUDA, torch.bfloat16, {"window": 4}, "'cudnn' cannot mask a sliding window"),
        ("cudnn", CUDA, torch.bfloat16, {"moved": True}, "cannot mask pieces of a row"),
    ],
)
def test_backend_that_cannot_do_it_says_so(
    backend: str, device: torch.device, dtype: torch.dtype, asked: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        choose_form(backend, device, dtype, **{"window": None, "documents": 0, "moved": 0} | asked)


def test_documents_are_never_computed_as_plain_causal() -> None:
    for backend in ("auto", "sdpa", "flash", "flex"):
        for dtype in (torch.bfloat16, torch.float32):
            if backend == "flash" and dtype == torch.float32:
                continue
            form = choose_form(backend, CUDA, dtype, window=None, documents=True, moved=False)
            assert form in ("varlen", "block", "dense")


def test_unknown_backend_is_refused_when_the_model_is_built() -> None:
    with pytest.raises(ModelError, match="'flsh' does not exist; did you mean 'flash'"):
        build_model(DecoderConfig.from_hf(hf("llama")), attention="flsh")


def test_layers_compile_without_a_graph_break() -> None:
    model = build_model(DecoderConfig.from_hf(hf("mistral", sliding_window=6)))
    init_weights(model, seed=0)
    tokens_BS = torch.randint(0, 96, (2, 16))
    documents_BS = (torch.arange(16) // 5).expand(2, 16)
    expected = model(tokens_BS, None, documents_BS)
    for layer in model.model.layers.values():
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(tokens_BS, None, documents_BS), expected)
