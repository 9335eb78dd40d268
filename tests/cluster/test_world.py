import socket

import pytest

from overland.cluster.errors import ClusterError
from overland.cluster.launch import free_port
from overland.cluster.world import World, find_world

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_no_world() -> None:
    assert find_world({}) is None
    assert find_world({"RANK": "0"}) is None
    assert find_world({"WORLD_SIZE": "4", "LOCAL_RANK": "1"}) is None


def test_torchruns_environment_is_read() -> None:
    env = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    world = find_world({**env, **MEETING})
    assert world == World(rank=11, size=16, local_rank=3, local_size=8)
    assert world.num_nodes == 2
    assert not world.is_first


def test_a_world_of_one_needs_no_meeting_point() -> None:
    world = find_world({"RANK": "0", "WORLD_SIZE": "1"})
    assert world == World()
    assert world.is_first
    assert world.num_nodes == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "one"}, 'environment RANK: "one": expected a whole number, 0 or more'),
        ({"WORLD_SIZE": "0"}, 'environment WORLD_SIZE: "0": expected a whole number, 1 or more'),
        ({"LOCAL_RANK": "-1"}, 'environment LOCAL_RANK: "-1": expected a whole number'),
        ({"RANK": "2"}, "environment RANK: 2 is not below WORLD_SIZE = 2"),
    ],
)
def test_a_broken_environment_is_one_sentence(env: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        find_world({"RANK": "0", "WORLD_SIZE": "2", **MEETING, **env})


def test_ranks_that_cannot_meet_are_told_what_is_missing() -> None:
    with pytest.raises(ClusterError, match="2 ranks need MASTER_ADDR and MASTER_PORT to meet"):
        find_world({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
