"""Every layout computes what one process computes: losses, gradient norms and validation losses
agree in float64.

The list is `overland.apps.proofs.layouts.SHORT`: every axis, stage and schedule; `make prove-all`
runs all of them, for more steps, and writes docs/evidence/layouts.md.
"""

from dataclasses import replace

import pytest

from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import (
    TOLERANCES,
    LayoutVerdict,
    References,
    Tolerance,
    curves,
    prove_layouts,
)
from overland.apps.proofs.layouts import LAYOUTS, SHORT, ProofLayout, parse
from overland.apps.proofs.pool import RankPool
from overland.apps.proofs.resume import prove_resumes

# A mistake shows after two steps (test_mistakes.py); the third has new masks of sparse weights.
STEPS = 3


@pytest.fixture(scope="module")
def alone() -> References:
    """What one process computes, for all layouts of a kind."""
    return {}


@pytest.mark.parametrize("layout", SHORT, ids=lambda layout: layout.name)
def test_layout_equals_one_process(ranks: RankPool, alone: References, layout: ProofLayout) -> None:
    (verdict,) = prove_layouts([layout], ranks, steps=STEPS, references=alone)
    assert verdict.is_equal, verdict


def test_float32_stays_within_its_tolerance(ranks: RankPool) -> None:
    """`make prove-all` does the same for all of the list, and in bfloat16, which takes a processor
    without instructions for it minutes."""
    (verdict,) = prove_layouts([parse("tp2")], ranks, "float32", STEPS)
    assert verdict.is_equal, verdict


def test_the_same_layout_run_twice_gives_the_same_bits(ranks: RankPool, tmp_path) -> None:
    job = proof_job(parse("tp2"), "float32", STEPS, tmp_path)
    assert ranks.run(2, curves, job) == ranks.run(2, curves, job)


def test_the_table_states_the_bounds_of_losses_and_of_the_norm() -> None:
    verdict = LayoutVerdict("tp2", 2, "float32", 9e-5, 9e-3, 9e-5, Tolerance(1e-4, 1e-2))
    assert verdict.is_equal
    assert verdict.cells()[2] == "float32 (≤ 0.0001, 0.01)"
    for worse in ("loss", "norm", "validation"):
        assert not replace(verdict, **{f"{worse}_difference": 2e-2}).is_equal


def test_the_full_list_covers_what_it_must() -> None:
    axes = {axis for layout in LAYOUTS for axis in layout.degrees}
    assert axes == {"pp", "rep", "shard", "cp", "tp"}
    assert len(LAYOUTS) >= 40
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    assert max(layout.num_ranks for layout in LAYOUTS) == 16
    for axis in axes:
        assert {2, 4} <= {
            layout.degrees[axis] for layout in LAYOUTS if set(layout.degrees) == {axis}
        }
    assert TOLERANCES["float64"] <= 1e-9


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zz2", "expected degrees such as pp2xtp2"),
        ("tp2:fast", "'fast' is none of zero0"),
        ("tp2+odd", "'odd' is none of tied"),
    ],
)
def test_a_layout_that_is_none_is_one_sentence(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pp2:ZBVZeroBubble+tied+frozen", "pp2:ZBVZeroBubble+tied+frozen"),
        ("pp2+frozenstage", "shard2+frozenstage"),
    ],
)
def test_frozen_parameters_are_saved_and_resumed(ranks: RankPool, before: str, after: str) -> None:
    """Both ends of a tied matrix on one rank, and a stage that has nothing to train."""
    (verdict,) = prove_resumes([(parse(before), parse(after))], ranks)
    assert verdict.is_equal, verdict
