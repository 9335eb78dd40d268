import itertools

import pytest

from overland.config.schema import JobConfig
from overland.training.schedule import changed_rate, learning_rate


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


def test_a_resumed_run_is_told_when_its_learning_rate_jumps() -> None:
    def config(steps: int, lr: float = 1e-3, **scheduler: object) -> JobConfig:
        return JobConfig.model_validate(
            {
                "training": {"steps": steps},
                "optimizer": {"lr": lr},
                "lr_scheduler": {"warmup_steps": 0, **scheduler},
            }
        )

    before = config(60).model_dump(mode="json")
    note = changed_rate(60, before, config(80))
    assert note == (
        "the schedule has changed with training.steps (60 → 80): the learning rate was 1.67e-05 "
        "and is now 2.50e-04; lr_scheduler.total_steps = 60 keeps the earlier one"
    )
    assert changed_rate(60, before, config(80, total_steps=60)) == ""
    assert changed_rate(30, before, config(60)) == ""
    assert "optimizer.lr (0.001 → 0.002): the" in changed_rate(30, before, config(60, lr=2e-3))
    assert changed_rate(60, before, config(60, lr=2e-3)) == ""  # there is no next step
    assert changed_rate(60, {}, config(80)) == ""
    assert changed_rate(60, {"training": {"steps": "many"}}, config(80)) == ""
