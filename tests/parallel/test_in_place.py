"""FSDP's collectives in place: the numbers of FSDP's own, without its copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.fsdp._fully_shard._fsdp_collectives as fsdp_collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_param_group

from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import Curve, curve
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.parallel import in_place, sharding
from overland.world import World

SHORT = ["shard4:accumulate", "rep2xshard2:full", "tp2xshard2", "shard2+lora"]
LONG = ["shard4:zero2", "cp2xshard2", "pp2xshard2", "shard2+qlora", "rep2", "shard2+dpocopy"]
LAYOUTS = [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


def curves(world: World, config: JobConfig, split: bool) -> tuple[Curve, Curve, list[str]]:
    """Returns the curves with FSDP's collectives and with ours, and what ours were asked to do."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SPLIT_SHARDS", split)
        patch.setattr(sharding, "IN_PLACE", False)
        theirs = curve(world, config)
        patch.setattr(sharding, "IN_PLACE", True)
        for name in ("_gather", "_copy_out", "_copy_in"):  # FSDP's own
            patch.setattr(in_place, name, _noted(getattr(in_place, name), name, asked))
        ours = curve(world, config)
    return theirs, ours, asked


def _noted(function, name, asked):  # type: ignore[no-untyped-def]
    def noted(*args):  # type: ignore[no-untyped-def]
        asked.append(name)
        return function(*args)

    return noted


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("split", [False, True])
def test_the_numbers_are_those_of_fsdps_own_collectives(
    ranks: RankPool, tmp_path: Path, name: str, split: bool
) -> None:
    """Also where the last ranks have fewer rows of a matrix than the others, or none."""
    layout = parse(name)
    job = proof_job(layout, "bfloat16" if split else "float64", 4, tmp_path)
    if "tp" not in name:
        job.model.overrides["vocab_size"] = 97
    for theirs, ours, asked in ranks.run(layout.num_ranks, curves, job, split):
        assert theirs == ours
        assert not asked, "FSDP's own collectives were used"


def test_fsdp_still_has_the_functions_that_are_replaced() -> None:
    assert in_place._gather is not in_place.gather
    for module, name in (
        (fsdp_param_group, "foreach_all_gather"),
        (fsdp_param_group, "foreach_all_gather_copy_out"),
        (fsdp_collectives, "foreach_reduce_scatter_copy_in"),
    ):
        assert callable(getattr(module, name))
