"""What we write is read by torch itself, and what torch writes is read by us."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from overland.apps.convert.formats import FORMATS, Options, open_any
from overland.apps.convert.formats.lazy import held
from overland.apps.convert.formats.torch_save import read_torch_file, write_torch_file
from overland.checkpoint.write import bytes_of

from .samples import contents, tiny_config, tiny_source

TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (7, 3), (2, 3, 4)], ids=str)
def test_every_type_and_shape_goes_through_torch_load(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    lazy = held(tensor)
    with (tmp_path / "ours.pt").open("wb") as file:
        file.write(b"before it, as in a .distcp file")
        start = file.tell()
        length = write_torch_file(file, {"a": lazy, "tied": lazy, "other": [1, (2.5, None)]})
    data = (tmp_path / "ours.pt").read_bytes()[start:]
    assert len(data) == length
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded["a"].dtype == dtype
    assert loaded["a"].shape == tensor.shape
    assert bytes_of(loaded["a"]) == bytes_of(tensor)
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()
    assert loaded["other"] == [1, (2.5, None)]

    torch.save({"a": tensor}, tmp_path / "theirs.pt")
    found = read_torch_file(tmp_path / "theirs.pt")["a"].load()
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert bytes_of(found) == bytes_of(tensor)


def test_a_file_of_ours_can_be_mapped(tmp_path: Path) -> None:
    """Which needs the alignment that torch gives its records."""
    tensor = torch.randn(1000)
    with (tmp_path / "a.pt").open("wb") as file:
        write_torch_file(file, {str(i): held(tensor + i) for i in range(5)})
    mapped = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    for i in range(5):
        assert torch.equal(mapped[str(i)], tensor + i)
        assert mapped[str(i)].data_ptr() % 64 == 0


def test_views_and_parameters_of_torch(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "transposed": base.t(),
        "columns": base[:, 1:4],
        "row": base[2],
        "parameter": nn.Parameter(base),
        "module": nn.Linear(3, 2).state_dict(),
    }
    torch.save(saved, tmp_path / "a.pt")
    read = read_torch_file(tmp_path / "a.pt")
    for name in ("transposed", "columns", "row", "parameter"):
        assert torch.equal(read[name].load(), saved[name])
    assert torch.equal(read["columns"].load_box((1, 0), (2, 2)), base[1:3, 1:3])
    assert torch.equal(read["row"].load_box((2,), (3,)), base[2, 2:5])
    assert torch.equal(read["module"]["weight"].load(), saved["module"]["weight"])


def test_stock_dcp_loads_what_we_write(tmp_path: Path) -> None:
    source = tiny_source(tiny_config())
    FORMATS["dcp"].write(source, tmp_path, Options(max_shard_bytes=50_000))
    assert len(list(tmp_path.glob("*.distcp"))) > 3
    names = [name.removeprefix("model.") for name in source.tensors if name.startswith("model.")]
    state = {
        "model": {n: torch.zeros(source.tensors[f"model.{n}"].shape) for n in names},
        "optimizer": {
            "state": {
                n: {
                    "exp_avg": torch.zeros(source.tensors[f"model.{n}"].shape),
                    "step": torch.zeros(()),
                }
                for n in names
            }
        },
        "train_state": {"step": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["train_state"]["step"] == 7
    for name in names:
        assert torch.equal(state["model"][name], source.read(f"model.{name}"))
        moments = state["optimizer"]["state"][name]
        assert torch.equal(moments["exp_avg"], source.read(f"optimizer.{name}.exp_avg"))
        assert moments["step"] == 7


def test_dcp_to_torch_save_unpacks_what_we_write(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source = tiny_source(tiny_config())
    (tmp_path / "dcp").mkdir()
    FORMATS["dcp"].write(source, tmp_path / "dcp", Options())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, lazy in source.weights().items():
        assert torch.equal(loaded["model"][name], lazy.load())
    group = loaded["optimizer"]["param_groups"]["model.norm.weight"]
    assert group["betas"] == (0.9, 0.95)


def test_adamw_goes_on_from_the_four_files(tmp_path: Path) -> None:
    """An optimizer that loads our file takes the same next step as the one that was saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))

    def optimizer_of(module: nn.Module) -> torch.optim.AdamW:
        matrices = [p for p in module.parameters() if p.ndim >= 2]
        vectors = [p for p in module.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    def step(module: nn.Module, optimizer: torch.optim.AdamW) -> None:
        module(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = optimizer_of(model)
    for _ in range(3):
        step(model, optimizer)
    names = dict(model.named_parameters())
    by_id = {id(p): name for name, p in names.items()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [by_id[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    tensors = {f"model.{name}": held(p) for name, p in names.items()}
    for parameter, state in optimizer.state.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{by_id[id(parameter)]}.{kind}"] = held(state[kind])
    tensors["optimizer.num_updates"] = held(torch.tensor(3.0))
    source = tiny_source(tiny_config()).with_tensors(tensors)
    source.extras = {"step": 3, "param_groups": groups, "best_validation_loss": 1.5}
    FORMATS["torch"].write(source, tmp_path, Options())

    files = {name: torch.load(tmp_path / f"{name}_state_dict.pt", weights_only=True)
             for name in ("model", "optim", "lr", "iter")}  # fmt: skip
    other = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    other.load_state_dict(files["model"])
    loaded = optimizer_of(other)
    loaded.load_state_dict(files["optim"])
    step(model, optimizer)
    step(other, loaded)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert files["iter"]["loss_min"] == 1.5
    assert files["lr"]["last_epoch"] == 3
    assert files["lr"]["_last_lr"] == [0.01, 0.01]


def test_optimizer_states_of_torch_are_read_by_number_and_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "model_state_dict.pt")
    state = optimizer.state_dict()
    by_name = {
        "state": {"weight": state["state"][0], "bias": state["state"][1]},
        "param_groups": [{**state["param_groups"][0], "params": ["weight", "bias"]}],
    }
    for form in (state, by_name):
        torch.save(form, tmp_path / "optim_state_dict.pt")
        found = contents(open_any(tmp_path))
        assert torch.equal(found["optimizer.bias.exp_avg"], state["state"][1]["exp_avg"])
        assert torch.equal(found["optimizer.weight.exp_avg_sq"], state["state"][0]["exp_avg_sq"])
        assert found["optimizer.num_updates"] == 1
