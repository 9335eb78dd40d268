"""How each axis splits what it splits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from overland.apps.proofs.pool import RankPool
from overland.config.derived import DegreeError, resolve_degrees
from overland.config.schema import Compile, Parallelism
from overland.models import resolve_config
from overland.models.flops import StageCosts, stage_costs
from overland.models.registry import build_model
from overland.parallel.blocks import compile_blocks
from overland.parallel.context import in_row_order, places_of_rank
from overland.parallel.mesh import build_mesh
from overland.parallel.pipeline import deal_blocks, stage_class, stages_of_rank
from overland.parallel.tensor import split_embedding
from overland.training.step import gradient_norm
from overland.world import World


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_shares_hold_every_place_once_and_weigh_the_same(size: int) -> None:
    shares = [places_of_rank(64, rank, size) for rank in range(size)]
    gathered = torch.cat(shares)
    assert sorted(gathered.tolist()) == list(range(64))
    assert in_row_order(gathered[None, None, :, None], size).flatten().tolist() == [*range(64)]
    work = {int((share + 1).sum()) for share in shares}  # keys that its queries look at
    assert len(work) == 1


def test_a_row_is_put_in_order_by_copies_alone() -> None:
    """A sort inside a compiled block takes a minute to compile, and an index adds up atomically."""
    traced = make_fx(lambda shares: in_row_order(shares, 4))(torch.zeros(1, 2, 64, 8))
    names = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert not [name for name in names if "sort" in name or "index" in name]


@pytest.mark.parametrize("flavor", ["1B", "8B", "405B"])
@pytest.mark.parametrize("num_stages", [2, 3, 8])
def test_layers_are_dealt_out_so_that_no_stage_is_much_slower(flavor: str, num_stages: int) -> None:
    config = resolve_config("llama3", flavor)
    given = stage_costs(config)
    shares = deal_blocks(given, num_stages)
    assert [i for share in shares for i in share] == list(range(config.num_hidden_layers))
    assert all(len(share) >= 1 for share in shares)
    layer, head = given.blocks[0], given.after
    assert head == config.hidden_size * config.vocab_size
    costs = [layer * len(share) for share in shares]
    costs[-1] += head
    ideal = (layer * config.num_hidden_layers + head) / num_stages
    assert max(costs) <= max(ideal + layer, layer + head)


def test_unequal_blocks_are_dealt_out_by_what_they_cost() -> None:
    shares = deal_blocks(StageCosts(blocks=(9.0, 1.0, 1.0, 1.0, 3.0, 3.0), after=3.0), 3)
    assert shares == [range(1), range(1, 5), range(5, 6)]
    assert deal_blocks(StageCosts(blocks=(1.0,) * 7, after=0.0), 3) == [
        range(3),
        range(3, 5),
        range(5, 7),
    ]


def test_stages_of_a_turning_schedule_meet_on_the_same_rank() -> None:
    assert [stages_of_rank(rank, 4, "ZBVZeroBubble") for rank in range(4)] == [
        [0, 7],
        [1, 6],
        [2, 5],
        [3, 4],
    ]
    assert [stages_of_rank(rank, 2, "Interleaved1F1B") for rank in range(2)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (1, 16)),
        ({"sharding_stage": "zero0"}, (16, 1)),
        ({"sharding_stage": "zero3"}, (1, 16)),
        ({"sharding_stage": "zero3_hybrid"}, (2, 8)),
        ({"data_parallel_replicate_degree": 4}, (4, 4)),
    ],
)
def test_stages_are_degrees_over_the_same_mesh(
    settings: dict[str, object], expected: tuple[int, int]
) -> None:
    degrees = resolve_degrees(Parallelism.model_validate(settings), 16, ranks_per_node=8)
    assert (degrees.dp_replicate, degrees.dp_shard) == expected


def test_degrees_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(DegreeError, match="= 4, but there are 6 devices"):
        resolve_degrees(Parallelism(tensor_parallel_degree=4), 6)


@pytest.mark.parametrize(
    ("degrees", "num_ranks", "expected"),
    [
        # Of rank 1: itself, those that hold other parts of parameters, other rows, other heads.
        ({"tensor_parallel_degree": 2}, 8, ["1", "01", "01234567", "1357"]),
        # A ring of its own for cp: its collectives overlap with those of the parameters.
        (
            {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
            4,
            ["0123", "01", "1", "13", "13"],
        ),
        ({"context_parallel_degree": 2}, 2, ["01", "01", "1"]),
        ({}, 4, ["0123", "1"]),
    ],
)
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_parts_with_the_same_ranks_share_a_group(
    degrees: dict[str, Any],
    num_ranks: int,
    expected: list[str],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: backend)  # no wheel of torch has MPI
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=num_ranks)
    try:
        mesh = build_mesh(resolve_degrees(Parallelism(**degrees), num_ranks), "cpu")
        ranks = ["".join(map(str, dist.get_process_group_ranks(group))) for group in mesh.groups]
        assert sorted(ranks) == sorted(expected)
        groups = {group for cut in mesh.cuts.values() for group in cut.get_all_groups()}
        assert groups <= set(mesh.groups)
    finally:
        dist.destroy_process_group()


def test_a_rank_that_waits_for_another_of_its_group_waits_as_long_as_asked(ranks: RankPool) -> None:
    assert ranks.run(2, waits_for_the_other) == ["timed out", "elsewhere"]


def waits_for_the_other(world: World) -> str:
    degrees = resolve_degrees(Parallelism(context_parallel_degree=2), world.size)
    mesh = build_mesh(degrees, "cpu", timeout_seconds=1)
    found = "elsewhere"
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.all_reduce(torch.zeros(1), group=mesh.axis("cp").get_group())
        found = "timed out"
    dist.barrier()
    return found


def test_blocks_are_compiled_for_more_shapes_than_torch_allows_by_itself() -> None:
    """Batches hold more or fewer documents, validation has another length."""
    with torch.device("meta"):
        model = build_model(resolve_config("llama3", "debug"))
    compile_blocks(model, Compile(enable=True, backend="eager"))
    for length in range(2, 12):
        model(torch.zeros(1, length, dtype=torch.int64, device="meta"))


def test_a_gradient_over_an_axis_that_no_sum_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new axis must be added to the mesh's lists; its norm would otherwise be of one rank."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer: Any = SimpleNamespace(parameters=[parameter])
    model: Any = SimpleNamespace(counted_once=lambda parameter: True)
    mesh: Any = None
    monkeypatch.setattr("overland.training.step.sharded_axes", lambda gradient: ("experts",))
    with pytest.raises(AssertionError, match="unknown axis"):
        gradient_norm(optimizer, model, mesh)


def test_a_rank_computes_the_gradient_of_its_part_of_the_vocabulary_only() -> None:
    """Torch's own style makes one of the whole table, on every rank."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for one in pytree.tree_leaves(out):
                if isinstance(one, torch.Tensor) and not isinstance(one, DTensor):
                    self.largest = max(self.largest, one.numel())
            return out

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        table = nn.Embedding(4000, 8)
        split_embedding(table, mesh)
        tokens = torch.arange(1000, 2000, 125)[None]  # all on this rank
        with Sizes() as sizes:
            table(tokens).sum().backward()
    finally:
        dist.destroy_process_group()
    assert isinstance(table.weight.grad, DTensor)
    assert table.weight.grad.shape == (4000, 8)
    assert sizes.largest == 1001 * 8  # one row more, for the tokens of others


def test_what_a_stage_receives_has_a_gradient_whatever_the_first_pass_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.11 and 2.12 see to it only if the very first pass has a backward pass."""
    monkeypatch.setattr(PipelineStage, "_prepare_backward_infra", lambda self, *args: None)
    stage = object.__new__(stage_class())
    hidden, tokens = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    received = (SimpleNamespace(buffer=hidden), SimpleNamespace(buffer=tokens), SimpleNamespace())
    stage.args_recv_info = {0: received}
    stage._prepare_backward_infra(1)
    assert hidden.requires_grad
    assert not tokens.requires_grad
