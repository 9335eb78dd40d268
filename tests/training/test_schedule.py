import itertools

import pytest

from overland.config.schema import JobConfig
from overland.training.schedule import learning_rate


def rates(steps: int = 100, **scheduler: object) -> list[float]:
    config = JobConfig.model_validate(
        {
            "training": {"steps": steps},
            "optimizer": {"lr": 1.0},
            "lr_scheduler": {"warmup_steps": 10, **scheduler},
        }
    )
    return [learning_rate(step, config) for step in range(steps + 1)]


def test_the_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    assert rates()[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert rates()[10] == 1.0


def test_the_warm_up_may_be_a_share_of_all_steps() -> None:
    assert rates(warmup_ratio=0.1) == rates(warmup_steps=10)
    assert rates(warmup_ratio=0.1, total_steps=200) == rates(warmup_steps=20, total_steps=200)
    assert rates(warmup_ratio=0.0)[0] == 1.0


@pytest.mark.parametrize(("decay_type", "half_way"), [("linear", 0.5), ("cosine", 0.5)])
def test_the_decay_ends_at_the_lowest_rate(decay_type: str, half_way: float) -> None:
    got = rates(decay_type=decay_type, min_lr_factor=0.2)
    assert got[55] == pytest.approx(0.2 + 0.8 * half_way)
    assert got[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(got[10:]))


def test_min_lr_is_the_lowest_rate_itself() -> None:
    assert rates(min_lr=0.05)[100] == pytest.approx(0.05)


def test_a_decay_ratio_leaves_a_plateau() -> None:
    got = rates(decay_ratio=0.2, decay_type="sqrt")
    assert got[10:80] == [1.0] * 70
    assert got[81] < 1.0
    assert got[100] == pytest.approx(0.0)


def test_constant_stays_at_the_peak() -> None:
    assert rates(decay_type="constant")[10:] == [1.0] * 91


def test_a_schedule_may_be_longer_or_shorter_than_the_run() -> None:
    assert rates(total_steps=200)[100] == pytest.approx(1 - 90 / 190)
    assert rates(total_steps=50)[60] == 0.0
    assert rates(steps=5)[4] == pytest.approx(5 / 11)
