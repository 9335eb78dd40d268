"""The pool of ranks that proofs and tests share."""

import pytest
import torch.distributed as dist

from overland.apps.proofs import pool as pools
from overland.apps.proofs.pool import RankPool
from overland.world import World


def test_a_rank_that_fails_is_heard_while_an_earlier_one_waits_for_it(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 1 as long as the pool is patient."""
    waited: list[float] = []

    def noted(pipes, seconds):
        waited.append(seconds)
        return wait(pipes, min(seconds, 60))

    wait = pools.wait
    monkeypatch.setattr(pools, "wait", noted)
    with pytest.raises(AssertionError) as failure:
        ranks.run(2, last_fails)
    assert "rank 0:\nno answer" in str(failure.value)
    assert "of its own" in str(failure.value).partition("rank 1:")[2]
    assert max(waited) > 60
    assert waited[-1] < 10


def last_fails(world: World) -> None:
    if world.rank == 1:
        raise ValueError("of its own")
    dist.barrier()
