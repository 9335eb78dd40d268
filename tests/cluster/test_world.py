"""How a process finds its place among the ranks, from environments recorded under each launcher.

The files in `environments/` say in their first line where they come from. Two are written by
documented names, since nobody here has a Cray.
"""

from pathlib import Path

import pytest

from overland.errors import ClusterError
from overland.world import Rendezvous, World
from overland.world.launchers import export_world, find_world
from overland.world.rendezvous import port_of_job, port_of_name

HERE = Path(__file__).parent / "environments"
GIVEN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
HAND_MADE = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", **GIVEN}


def recorded(name: str, **changes: str) -> dict[str, str]:
    lines = (HERE / f"{name}.env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {**{name: value for name, _, value in pairs}, **changes}


@pytest.mark.parametrize(
    ("name", "place", "rendezvous"),
    [
        ("srun", (5, 8, 1, 2), ("n1", port_of_job(1, 0), "slurm-1.0")),
        ("srun_cray", (5, 8, 1, 2), ("n1", port_of_job(1, 0), "slurm-1.0")),
        ("srun_pmi2", (3, 4, 1, 2), ("n1", port_of_job(4, 0), "slurm-4.0")),
        ("srun_part", (1, 2, 1, 2), ("127.0.0.1", port_of_job(7, 0), "slurm-7.0")),
        ("srun_second", (7, 8, 1, 2), ("n1", port_of_job(8, 1), "slurm-8.1")),
        ("mpirun", (2, 4, 2, 4), ("127.0.0.1", None, "openmpi-")),
        ("mpirun_in_slurm", (2, 4, 0, 2), ("n1", None, "openmpi-321060865")),
        ("mpich", (2, 4, 2, 4), ("127.0.0.1", None, "mpich-")),
        ("mpich_in_slurm", (0, 4, 0, 2), ("n1", None, "mpich-14.0")),
        ("torchrun", (1, 2, 1, 2), None),
        ("torchrun_under_srun", (3, 4, 1, 2), None),
    ],
)
def test_a_recorded_environment_is_read(
    name: str, place: tuple[int, int, int, int], rendezvous: tuple[str, int | None, str] | None
) -> None:
    world = find_world(recorded(name))
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == place
    if rendezvous is None:  # torchrun opens the meeting point itself
        assert world.rendezvous is None
        return
    assert world.rendezvous is not None
    address, port, start = rendezvous
    assert world.rendezvous.address == address
    assert world.rendezvous.name.startswith(start)
    assert world.rendezvous.port == (port or port_of_name(world.rendezvous.name))


def test_pals_is_read_by_its_documented_names(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("x1000\nx1001\n")
    world = find_world(recorded("pals", PBS_NODEFILE=str(tmp_path / "nodes")))
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (6, 8, 2, 4)
    assert world.rendezvous is not None
    assert world.rendezvous.address == "x1000"
    assert world.rendezvous.name.startswith("pals-")


@pytest.mark.parametrize(
    "name", ["sbatch", "sbatch_from_task", "salloc", "salloc_interactive", "srun_one_task"]
)
def test_a_shell_inside_an_allocation_is_no_task_of_a_step(name: str) -> None:
    assert find_world(recorded(name)) is None


def test_without_a_launcher_there_is_no_world() -> None:
    assert find_world({}) is None
    assert find_world({"RANK": "0"}) is None
    assert find_world({"WORLD_SIZE": "4", "LOCAL_RANK": "1"}) is None


@pytest.mark.parametrize("name", ["srun", "srun_second", "mpirun", "mpirun_in_slurm", "mpich"])
def test_a_given_meeting_point_is_respected(name: str) -> None:
    world = find_world(recorded(name, **GIVEN))
    assert world is not None
    assert world.rendezvous is not None
    assert (world.rendezvous.address, world.rendezvous.port) == ("10.0.0.1", 29500)


def test_several_addresses_of_hostname_i_mean_the_first() -> None:
    world = find_world(recorded("srun", MASTER_ADDR="10.0.0.1 10.1.0.1 "))
    assert world is not None
    assert world.rendezvous is not None
    assert world.rendezvous.address == "10.0.0.1"


def test_variables_set_by_hand_are_read() -> None:
    world = find_world(HAND_MADE)
    assert world == World(11, 16, 3, 8, Rendezvous("10.0.0.1", 29500, "ranks"))
    assert world.num_nodes == 2
    assert not world.is_first


def test_ranks_set_by_hand_under_srun_know_their_node() -> None:
    world = find_world(recorded("srun", RANK="5", WORLD_SIZE="8", **GIVEN))
    assert world is not None
    assert (world.local_rank, world.local_size) == (1, 2)
    assert world.rendezvous == Rendezvous("10.0.0.1", 29500, "ranks-1")


def test_a_world_of_one_needs_no_meeting_point() -> None:
    world = find_world({"RANK": "0", "WORLD_SIZE": "1"})
    assert world == World()
    assert world.is_first
    assert world.num_nodes == 1


def test_others_are_told_the_place_under_torchruns_names() -> None:
    env: dict[str, str] = {}
    export_world(World(5, 8, 1, 2), env)
    assert env == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "one"}, 'environment RANK: "one": expected a whole number, 0 or more'),
        ({"WORLD_SIZE": "0"}, 'environment WORLD_SIZE: "0": expected a whole number, 1 or more'),
        ({"LOCAL_RANK": "-1"}, 'environment LOCAL_RANK: "-1": expected a whole number'),
        ({"RANK": "16"}, "environment RANK: 16 must be below WORLD_SIZE = 16"),
        ({"MASTER_PORT": "x"}, 'environment MASTER_PORT: "x": expected a whole number'),
        ({"GROUP_WORLD_SIZE": "3"}, "give every torchrun the same --nproc-per-node"),
    ],
)
def test_a_broken_environment_is_one_sentence(env: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        find_world({**HAND_MADE, **env})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("srun_uneven", {}, "3,1,1: every node needs the same number of ranks"),
        ("srun_cyclic", {}, "ranks 0,2 share a node: .* --distribution=block"),
        ("pals", {}, "ranks on several nodes need MASTER_ADDR"),
        ("pals", {"PALS_LOCAL_SIZE": "", "PMI_LOCAL_SIZE": ""}, "one of 8 processes, but it is"),
    ],
)
def test_a_world_that_cannot_be_is_one_sentence(
    name: str, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        find_world(recorded(name, **changes))


@pytest.mark.parametrize(
    ("local_size", "message"),
    [("3", "every node needs the same number"), ("2", "start mpirun with --map-by slot")],
)
def test_ranks_that_mpirun_spread_unevenly_are_one_sentence(local_size: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        find_world(recorded("mpirun", OMPI_COMM_WORLD_LOCAL_SIZE=local_size, **GIVEN))


def test_ranks_that_cannot_meet_are_told_what_is_missing() -> None:
    with pytest.raises(ClusterError, match="2 ranks need MASTER_ADDR and MASTER_PORT to find"):
        find_world({"RANK": "0", "WORLD_SIZE": "2"})
