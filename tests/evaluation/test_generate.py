"""Texts are continued as transformers does it, with and without a cache, alone or in a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from overland.apps.evaluation.cache import CachedDecoder, can_cache
from overland.apps.evaluation.generate import GenerationRequest, Generator, Reason
from overland.apps.evaluation.sampling import Sampling
from overland.errors import DataError, ModelError
from overland.models.attention import Attention, Masks
from tests.models.tiny import CASES, hf

from .engines import Letters, continued, opened, some_prompts, tiny

WARM = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)
WITH_TRANSFORMERS = [
    ("Llama 3.2, tied", "llama3"),
    ("Mistral, window 8", "default"),
    ("Qwen2, layer_types", "default"),
    ("Qwen3, tied, biases", "yarn"),
]


@pytest.mark.parametrize("case", WITH_TRANSFORMERS, ids=" / ".join)
def test_greedy_text_equals_that_of_transformers(case: tuple[str, str]) -> None:
    pytest.importorskip("transformers")
    from tests.models.test_parity import reference

    theirs = reference({**CASES[case][0], "max_position_embeddings": 256})
    ours = tiny(CASES[case][0])
    ours.load_state_dict(theirs.state_dict())
    prompts = some_prompts((3, 12))
    wanted = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False,
                        eos_token_id=None, pad_token_id=0)[0, len(prompt):].tolist()
        for prompt in prompts
    ]  # fmt: skip
    for cached in (True, False):
        found = continued(ours, prompts, 20, cached=cached)
        assert [list(one.ids) for one in found] == wanted, cached


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", WITH_TRANSFORMERS[1:3], ids=" / ".join)
def test_cache_and_batch_change_nothing(case: tuple[str, str], sampling: Sampling) -> None:
    model, prompts = tiny(CASES[case][0]), some_prompts()
    together = continued(model, prompts, 16, sampling=sampling)
    assert together == continued(model, prompts, 16, sampling=sampling, cached=False)
    assert together == continued(model, prompts, 16, sampling=sampling, batch_size=2)
    alone = [
        continued(model, [prompt], 16, sampling=sampling, batch_size=1, first=number)[0]
        for number, prompt in enumerate(prompts)
    ]
    assert together == alone
    assert len({one.ids for one in together}) == len(prompts)


def test_known_tokens_one_by_one_are_the_same_as_all_at_once() -> None:
    model = tiny(CASES["Mistral, window 8", "default"][0])
    tokens_BS = torch.tensor(some_prompts((24, 24)))
    with torch.no_grad():
        wanted = model(tokens_BS)
        decoder = CachedDecoder(model, 2)
        decoder.reserve(24)
        decoder.start([tokens_BS[0, :10].tolist(), tokens_BS[1, :4].tolist()])
        for number in range(12):  # rows of different lengths
            found = decoder.step(torch.stack([tokens_BS[0, 10 + number], tokens_BS[1, 4 + number]]))
            for row, length in ((0, 10), (1, 4)):
                here = wanted[row, length + number]
                assert torch.allclose(found[row], here, rtol=0, atol=1e-5)


def test_prompts_are_begun_in_parts_if_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = tiny(), some_prompts((5, 9, 2, 7, 11))
    wanted = continued(model, prompts, 6)
    monkeypatch.setattr("overland.apps.evaluation.cache.PREFILL_TOKENS", 20)
    assert continued(model, prompts, 6) == wanted


def test_the_cache_grows_with_the_rows() -> None:
    model, prompts = tiny(), some_prompts((5, 9))
    generator = Generator(opened(model, context=2000), batch_size=2, length=2000)
    short = generator.generate(prompts, GenerationRequest(4))
    assert generator.rows.capacity == 256  # type: ignore[attr-defined]
    long = generator.generate(prompts, GenerationRequest(300))
    assert generator.rows.capacity == 512  # type: ignore[attr-defined]
    assert [one.ids[:4] for one in long] == [one.ids for one in short]


def test_a_closed_generator_leaves_the_model_as_it_was() -> None:
    model = tiny()
    tokens_BS = torch.tensor([some_prompts((9,))[0]])
    before = model(tokens_BS)
    continued(model, some_prompts(), 3)
    assert torch.equal(model(tokens_BS), before)
    kinds = Counter(type(one) for one in model.modules())
    assert (kinds[Masks], kinds[Attention]) == (1, 3)


def test_the_draws_have_the_probabilities_of_the_model() -> None:
    """4,000 prompts, which are the same but for their numbers."""
    model = tiny()
    (prompt,) = some_prompts((6,))
    how = Sampling(temperature=0.7, seed=2)
    found = continued(model, [prompt] * 4000, 1, batch_size=4000, sampling=how)
    counts = torch.zeros(96)
    for one in found:
        counts[one.ids[0]] += 1
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([prompt]))[0, -1] / 0.7, dim=-1)
    # Pearson's chi-squared: 95 degrees of freedom have mean 95 and standard deviation 14.
    likely = chances > 5 / 4000
    expected = 4000 * chances
    parts = (counts - expected)[likely].square() / expected[likely]
    rest = (counts - expected)[~likely].sum().square() / expected[~likely].sum()
    assert likely.sum() > 20
    assert float(parts.sum() + rest) < 95 + 5 * 14


@pytest.mark.parametrize("repeated", [1, 2])
def test_the_same_seed_gives_the_same_text_and_another_seed_another(repeated: int) -> None:
    model, prompts = tiny(), some_prompts((4,)) * repeated

    def texts(seed: int) -> list[str]:
        how = Sampling(temperature=1.0, seed=seed)
        return [one.text for one in continued(model, prompts, 20, sampling=how)]

    assert texts(3) == texts(3)
    assert texts(3) != texts(4)
    assert len({*texts(3)}) == repeated  # prompts that are alike are continued differently


def likeliest(model: Any, prompt: list[int], count: int) -> list[int]:
    return list(continued(model, [prompt], count)[0].ids)


def test_a_text_ends_at_any_of_the_end_ids_which_are_not_part_of_it() -> None:
    model, (prompt,) = tiny(), some_prompts((5,))
    ids = likeliest(model, prompt, 12)
    first = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    (one,) = continued(model, [prompt], 12, end_ids=(ids[first], 1))
    assert (list(one.ids), one.reason) == (ids[:first], Reason.END)
    assert continued(model, [prompt], 12)[0].reason == Reason.TOKENS


def test_rows_that_have_ended_do_not_disturb_the_others() -> None:
    model, prompts = tiny(), some_prompts()
    whole = continued(model, prompts, 20)
    end = whole[0].ids[2]
    cut = continued(model, prompts, 20, end_ids=(end,))
    for before, after in zip(whole, cut, strict=True):
        ids = list(before.ids)
        assert list(after.ids) == ids[: ids.index(end)] if end in ids else ids


def test_a_text_ends_before_a_stop_string_also_if_it_spans_tokens() -> None:
    model, (prompt,) = tiny(), some_prompts((5,))
    ids = likeliest(model, prompt, 16)
    text = Letters().decode(ids)
    stop = text[6:9]
    (one,) = continued(model, [prompt], 16, stop=["nowhere", stop])
    assert one.text == text[: text.index(stop)]
    assert one.reason == Reason.STOP
    assert list(one.ids) == ids[: text.index(stop) + 3]


def test_a_special_token_can_be_a_stop_string() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[1] = 100 * model.lm_head.weight[1]  # type: ignore[union-attr, index]
    prompts = some_prompts((5, 6, 7, 8, 9, 10))
    with_token = continued(model, prompts, 16, stop=["<turn>"])
    assert Reason.END in {one.reason for one in with_token}
    assert all(1 not in one.ids for one in with_token)


def test_a_text_ends_where_the_context_is_full() -> None:
    model, prompts = tiny(), some_prompts((3, 10, 12))
    generator = Generator(opened(model, context=12), batch_size=3, length=100)
    found = generator.generate(prompts, GenerationRequest(5))
    assert [len(one.ids) for one in found] == [5, 3, 1]
    assert [one.reason for one in found] == [Reason.TOKENS, Reason.CONTEXT, Reason.CONTEXT]
    generator.close()
    whole = continued(model, prompts, 5)
    assert [one.ids for one in found] == [
        one.ids[:n] for one, n in zip(whole, (5, 3, 1), strict=True)
    ]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, DataError, "prompt 1 is empty"),
        ([5] * 257, {}, DataError, "prompt 1 has 257 tokens, but the limit is 256"),
        ([5, 96], {}, ModelError, "produced token 96, but the model's vocabulary has 96"),
        ([5], {"stop": [""]}, DataError, "would end every text before it starts"),
    ],
)
def test_what_cannot_be_continued_is_said(
    prompt: list[int], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        continued(tiny(), [prompt], 3, **options)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_weights_are_named(temperature: float, cached: bool) -> None:
    model = tiny()
    with torch.no_grad():
        model.model.layers["1"].mlp.up_proj.weight[3, 5] = torch.nan  # type: ignore
    with pytest.raises(ModelError, match="not finite"):
        continued(model, [[5]], 3, cached=cached, sampling=Sampling(temperature=temperature))


def test_a_model_with_parts_of_somebody_else_has_no_cache() -> None:
    class Sums(torch.nn.Module):
        """Mixes tokens, which a cache would not know of."""

        def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
            return x_BSD.cumsum(dim=1)

    model = tiny()
    assert can_cache(model)
    model.model.layers["1"].mlp = Sums()  # type: ignore
    assert not can_cache(model)
    prompts = some_prompts()
    found = continued(model, prompts, 4)
    for prompt, one in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in one.ids:
            with torch.no_grad():
                assert int(model(torch.tensor([ids]))[0, -1].argmax()) == token
            ids.append(token)

    hooked = tiny()
    hooked.model.layers["0"].register_forward_hook(lambda *args: None)  # type: ignore
    assert not can_cache(hooked)
    compiled = tiny()
    compiled.model.layers["0"]._compiled_call_impl = print  # type: ignore # as compile() does
    assert not can_cache(compiled)
    patched = tiny()
    layer = patched.model.layers["0"]  # type: ignore
    layer.forward = lambda *args: type(layer).forward(layer, *args)
    assert not can_cache(patched)


def test_pieces_of_a_stream_are_the_text() -> None:
    model, (prompt,) = tiny(hf("llama")), some_prompts((5,))
    (whole,) = continued(model, [prompt], 20, sampling=WARM, stop=["\u0123\u0124\u0125"])
    generator = Generator(opened(model), batch_size=1, length=256)
    asked = GenerationRequest(20, WARM, stop=["\u0123\u0124\u0125"])
    pieces = list(generator.stream(prompt, asked))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 10
