"""Ranks that belong together find each other, and others do not, even on the same port."""

import socket
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from overland.errors import ClusterError
from overland.world import Rendezvous, World
from overland.world.launch import free_port
from overland.world.rendezvous import (
    open_store,
    port_of_job,
    port_of_name,
    reachable,
    wait_for_all,
)


def test_jobs_and_steps_near_each_other_have_ports_of_their_own() -> None:
    ports = [port_of_job(job, step) for job in range(9000, 9000 + 3192) for step in range(4)]
    assert len(set(ports)) == len(ports)
    assert min(ports) == 20000
    assert max(ports) == 32767
    assert 20000 <= port_of_name("openmpi-740491265") <= 32767


def test_ranks_meet_in_a_store_that_listens_at_their_address_only() -> None:
    port = free_port()
    first, second = two_ranks(Rendezvous("127.0.0.1", port, "job-1"))
    assert first is not None
    assert second is not None
    first.set("word", "heard")
    assert second.get("word") == b"heard"
    with socket.socket() as elsewhere, pytest.raises(OSError, match="refused"):
        elsewhere.connect(("127.0.0.2", port))


def test_two_worlds_at_one_port_do_not_meet() -> None:
    port = free_port()
    ours = Rendezvous("127.0.0.1", port, "slurm-1.0")
    theirs = Rendezvous("127.0.0.1", port, "slurm-3193.0")
    store, _ = two_ranks(ours)
    assert store is not None
    with pytest.raises(ClusterError, match=f"port {port} of 127.0.0.1 is in use"):
        open_store(World(0, 2, 0, 2, theirs), 1)
    with pytest.raises(ClusterError, match=r"rank 1 did not find rank 0 of slurm-3193\.0"):
        open_store(World(1, 2, 1, 2, theirs), 1)


def test_uneven_nodes_are_found_where_they_meet() -> None:
    rendezvous = Rendezvous("127.0.0.1", free_port(), "openmpi-1")
    store = open_store(World(0, 4, 0, 2, rendezvous), 5)
    assert store is not None
    with pytest.raises(
        ClusterError, match="1 ranks on the node of rank 2, but 2 on that of rank 0"
    ):
        open_store(World(2, 4, 0, 1, rendezvous), 5)


def test_ranks_that_do_not_join_are_named() -> None:
    store = dist.HashStore()
    store.set("joined 2", "")
    with pytest.raises(ClusterError, match=r"ranks 1, 3 of 4 did not join within 1 s \(comm\."):
        wait_for_all(store, World(0, 4, 0, 4), 1)
    store.set("joined 1", "")
    store.set("joined 3", "")
    wait_for_all(store, World(0, 4, 0, 4), 1)
    wait_for_all(store, World(3, 4, 3, 4), 1)


def test_an_address_that_is_not_rank_0s_is_named() -> None:
    rendezvous = Rendezvous("203.0.113.1", free_port(), "job-1")
    with pytest.raises(ClusterError, match=r"203\.0\.113\.1 does not belong to"):
        open_store(World(0, 2, 0, 1, rendezvous), 5)


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(ClusterError, match="set MASTER_ADDR to the address of rank 0's node"):
        reachable("no-such-node-17")


def two_ranks(rendezvous: Rendezvous) -> list[dist.Store | None]:
    stores: list[dist.Store | None] = [None, None]

    def join(rank: int) -> Callable[[], None]:
        def run() -> None:
            stores[rank] = open_store(World(rank, 2, rank, 2, rendezvous), 10)

        return run

    threads = [threading.Thread(target=join(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stores
