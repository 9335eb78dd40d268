import itertools

import pytest
import torch

from overland.errors import ModelError
from overland.tools.evaluation.generate import generate

VOCAB = 16


def counting_up(tokens_BS: torch.Tensor) -> torch.Tensor:
    """A model that prefers the next number, but not by much."""
    return torch.nn.functional.one_hot((tokens_BS + 1) % VOCAB, VOCAB).float() * 3.0


def test_temperature_0_takes_the_likeliest_token() -> None:
    found = list(generate(counting_up, [5], num_tokens=6, context=8, temperature=0))
    assert found == [6, 7, 8, 9, 10, 11]


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    def sample(seed: int) -> list[int]:
        return list(generate(counting_up, [1], num_tokens=40, context=8, seed=seed))

    assert sample(3) == sample(3)
    assert sample(3) != sample(4)


def test_a_high_temperature_is_more_varied_than_a_low_one() -> None:
    def hits(temperature: float) -> int:
        tokens = [0, *generate(counting_up, [0], num_tokens=200, context=4,
                               temperature=temperature)]  # fmt: skip
        return sum((a + 1) % VOCAB == b for a, b in itertools.pairwise(tokens))

    assert hits(0.5) > hits(3.0)


def test_it_stops_at_the_end_id_which_is_not_part_of_the_text() -> None:
    found = list(generate(counting_up, [5], num_tokens=99, context=8, temperature=0, end_id=9))
    assert found == [6, 7, 8]


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 30])
def test_the_input_keeps_one_length_and_ends_with_the_last_tokens(prompt_length: int) -> None:
    seen: list[torch.Tensor] = []

    def watched(tokens_BS: torch.Tensor) -> torch.Tensor:
        seen.append(tokens_BS)
        return counting_up(tokens_BS)

    prompt = [i % VOCAB for i in range(prompt_length)]
    found = list(generate(watched, prompt, num_tokens=3, context=8, temperature=0))
    assert {tuple(tokens_BS.shape) for tokens_BS in seen} == {(1, 8)}
    window = prompt[-8:]
    assert seen[0][0, : len(window)].tolist() == window
    assert found == [(prompt_length + i) % VOCAB for i in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_weights_are_named(temperature: float) -> None:
    tokens = generate(
        lambda tokens_BS: counting_up(tokens_BS) * torch.nan,
        [5],
        num_tokens=1,
        context=8,
        temperature=temperature,
    )
    with pytest.raises(ModelError, match="not finite"):
        list(tokens)
