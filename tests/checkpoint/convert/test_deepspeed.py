"""What the DeepSpeed fixtures lack: padding, frozen parameters, buffers, gaps, missing files."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overland.apps.convert.formats import open_any
from overland.apps.convert.formats.deepspeed import _by_rank
from overland.errors import CheckpointError

from .samples import assert_same, contents

SHAPES = {"a.weight": (3, 5), "b.bias": (2,), "c.weight": (1, 3)}


def parameters(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def model_states(**more: Any) -> dict[str, Any]:
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    return {"module": {}, "param_shapes": [shapes], "global_steps": 5, **more}


def save_optimizer(folder: Path, rank: int, stage: int, vectors: dict[str, Tensor]) -> None:
    adam = {"step": torch.tensor(5.0), **{k: v for k, v in vectors.items() if k != "fp32"}}
    state: dict[str, Any] = {"zero_stage": stage, "partition_count": 3}
    if stage == 3:
        state |= {"fp32_flat_groups": [vectors["fp32"]], "optimizer_state_dict": {
            "state": {0: adam}, "param_groups": [{"lr": 0.1, "params": [0]}]}}  # fmt: skip
    else:
        state |= {"single_partition_of_fp32_groups": [vectors["fp32"]], "base_optimizer_state": {
            "state": {0: adam}, "param_groups": [{"lr": 0.1, "params": [0]}]}}  # fmt: skip
    file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state}, file)


def cut(stage: int, tensors: dict[str, Tensor], world: int) -> list[Tensor]:
    """The ranks' vectors, as the library cuts them, with padding that is no zero."""
    if stage == 3:
        ranks: list[list[Tensor]] = [[] for _ in range(world)]
        for tensor in tensors.values():
            each = math.ceil(tensor.numel() / world)
            padded = torch.full((each * world,), torch.nan)
            padded[: tensor.numel()] = tensor.flatten()
            for rank, piece in enumerate(padded.chunk(world)):
                ranks[rank].append(piece)
        return [torch.cat(pieces) for pieces in ranks]
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    padded = torch.full((math.ceil(flat.numel() / (2 * world)) * 2 * world,), torch.nan)
    padded[: flat.numel()] = flat
    return list(padded.chunk(world))


def expected(kinds: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    wanted = {f"model.{name}": tensor for name, tensor in kinds["fp32"].items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        wanted |= {f"optimizer.{name}.{kind}": t for name, t in kinds[kind].items()}
    return wanted | {"optimizer.num_updates": torch.tensor(5.0)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padding_falls_away(stage: int, tmp_path: Path) -> None:
    kinds = {kind: parameters(i) for i, kind in enumerate(("fp32", "exp_avg", "exp_avg_sq"))}
    pieces = {kind: cut(stage, tensors, 3) for kind, tensors in kinds.items()}
    for rank in range(3):
        vectors = {kind: pieces[kind][rank].clone() for kind in kinds}
        save_optimizer(tmp_path, rank, stage, vectors)
        name = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model_states(), tmp_path / f"{name}mp_rank_00_model_states.pt")
    source = open_any(tmp_path)
    assert_same(contents(source), expected(kinds))
    assert source.extras["param_groups"] == [{"lr": 0.1, "names": list(SHAPES)}]


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_buffers_and_shared_ones(stage: int, tmp_path: Path) -> None:
    weights, frozen = parameters(), torch.randn(4, 5).bfloat16()
    pieces = cut(stage, weights, 3)
    buffer, count = torch.randn(3).half(), torch.tensor([4, 2])
    padded = torch.zeros(21, dtype=torch.bfloat16)
    padded[:20] = frozen.flatten()
    for rank in range(3):
        moments = {"exp_avg": pieces[rank].clone(), "exp_avg_sq": pieces[rank].clone()}
        save_optimizer(tmp_path, rank, stage, {"fp32": pieces[rank].clone(), **moments})
        fragment = padded.chunk(3)[rank].clone() if stage == 3 else frozen
        state = model_states(
            frozen_param_shapes={"frozen": torch.Size([4, 5])},
            frozen_param_fragments={"frozen": fragment},
            buffer_names=["running", "count"],
            shared_params={"tied": "a.weight", "tied too": "frozen"},
        )
        state["module"] = {"running": buffer, "count": count}
        name = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(state, tmp_path / f"{name}mp_rank_00_model_states.pt")
    found = {name: lazy.load() for name, lazy in open_any(tmp_path).weights().items()}
    assert_same(
        found,
        {
            **weights,
            "frozen": frozen.float(),
            "tied too": frozen.float(),
            "running": buffer.float(),
            "count": count,
            "tied": weights["a.weight"],
        },
    )


@pytest.fixture
def fragment_address(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of the name that DeepSpeed's files hold, so that torch.save can write one."""

    class FragmentAddress:
        def __init__(self, start: int, numel: int) -> None:
            self.start, self.numel = start, numel

    name = "deepspeed.utils.tensor_fragment"
    FragmentAddress.__module__, FragmentAddress.__qualname__ = name, "fragment_address"
    module = types.ModuleType(name)
    module.fragment_address = FragmentAddress  # type: ignore[attr-defined]
    for part in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, name, module)
    return FragmentAddress


def test_gaps_between_aligned_parameters(tmp_path: Path, fragment_address: type) -> None:
    weights = parameters()
    flat, mapping, place = torch.full((30,), torch.nan), {}, 0
    for name, tensor in weights.items():
        flat[place : place + tensor.numel()] = tensor.flatten()
        mapping[name] = (place, place + tensor.numel())
        place += math.ceil(tensor.numel() / 8) * 8
    torch.save(model_states(), tmp_path / "mp_rank_00_model_states.pt")
    for rank, piece in enumerate(flat.chunk(3)):  # the first parameter lies on two ranks
        slices = {}
        for name, (start, end) in mapping.items():
            first, last = max(start, rank * 10), min(end, rank * 10 + 10)
            if first < last:
                slices[name] = fragment_address(first - rank * 10, last - first)
        state = {
            "zero_stage": 2,
            "partition_count": [3],
            "single_partition_of_fp32_groups": [piece.clone()],
            "base_optimizer_state": {"state": {}, "param_groups": []},
            "param_alignment_paddings": [[1, 6, 5]],
            "param_slice_mappings": [slices],
        }
        file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, file)
    assert_same({n: t.load() for n, t in open_any(tmp_path).weights().items()}, weights)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    pieces = cut(2, parameters(), 3)
    torch.save(model_states(), tmp_path / "mp_rank_00_model_states.pt")
    for rank in range(3):
        save_optimizer(tmp_path, rank, 2, {"fp32": pieces[rank].clone()})
    open_any(tmp_path)
    save_optimizer(tmp_path, 1, 2, {"fp32": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="do not belong together"):
        open_any(tmp_path)
    save_optimizer(tmp_path, 1, 2, {"fp32": torch.zeros(100)})
    with pytest.raises(CheckpointError, match="do not belong together"):
        open_any(tmp_path)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="of some rank"):
        open_any(tmp_path)


def test_without_zero_the_weights_are_whole(tmp_path: Path) -> None:
    weights = parameters()
    torch.save(model_states(module=weights), tmp_path / "mp_rank_00_model_states.pt")
    assert_same({n: t.load() for n, t in open_any(tmp_path).weights().items()}, weights)


def test_tensor_parallel_files_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(model_states(), tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor parallelism"):
        open_any(tmp_path)


def test_more_than_ten_ranks_are_put_together_by_number(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in _by_rank(tmp_path, "optim_states.pt")] == names
