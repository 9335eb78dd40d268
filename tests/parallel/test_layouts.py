"""Every layout computes what one process computes: equal losses and gradient norms in float64."""

from pathlib import Path
from typing import Any

import pytest

from overland.cluster.pool import RankPool
from tests.jobs import TINY_MODEL, losses_and_norms, tiny_job

TOLERANCE = 1e-9

KEYS = {
    "pp": "pipeline_parallel_degree",
    "rep": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


def layout_job(folder: Path, layout: dict[str, int], **sections: dict[str, Any]) -> Any:
    degrees = {KEYS[axis]: degree for axis, degree in layout.items()}
    degrees = {KEYS["shard"]: 1, **degrees}
    sections["parallelism"] = {**degrees, **sections.get("parallelism", {})}
    sections["training"] = {"local_batch_size": 1, **sections.get("training", {})}
    model = {"overrides": {**TINY_MODEL, "num_hidden_layers": 4}}
    return tiny_job(folder, **{"model": model, **sections})


def size(layout: dict[str, int]) -> int:
    product = 1
    for degree in layout.values():
        product *= degree
    return product


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"cp": 2},
        {"pp": 2},
        {"tp": 2, "shard": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2, "tp": 2},
    ],
    ids=str,
)
def test_layout(ranks: RankPool, tmp_path: Path, layout: dict[str, int]) -> None:
    expected = ranks.run(1, losses_and_norms, layout_job(tmp_path / "one", {}))[0]
    got = ranks.run(size(layout), losses_and_norms, layout_job(tmp_path / "many", layout))
    for one in got:
        assert one == [pytest.approx(pair, rel=TOLERANCE) for pair in expected]
