"""The conductor of a preflight: decides which checks run, in which order, on which nodes, what
`--quick` leaves out, and what is measured twice; `judge.py` judges the answers.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from overland.cluster.preflight import judge, start
from overland.cluster.preflight.crew import LIMITS, Crew, Phases, Task
from overland.cluster.preflight.judge import Bounds, Finding, Match, Pair, Place
from overland.cluster.preflight.measure import measure_versions
from overland.cluster.preflight.report import Report
from overland.cluster.preflight.start import Started
from overland.cluster.preflight.task import run_task
from overland.cluster.wire import ADDRESS, KEY, Message, Switchboard
from overland.errors import ClusterError
from overland.slurm import expand_hosts
from overland.world import World
from overland.world.devices import refusal_to_share
from overland.world.heartbeat import node_name
from overland.world.rendezvous import SECRET, open_store, reachable, secret_of

MOST_REASONS = 4  # per node, in case all eight devices have the same fault
SECONDS_PER_RANK = 0.05  # for the all-reduce: thousands of ranks take minutes to connect
DISK_BYTES, QUICK_DISK_BYTES = 64 * 2**20, 16 * 2**20
START_SECONDS = 300  # for ranks to find the first one
NAME = "preflight"  # key under which the first rank tells the others where to connect


@dataclass(frozen=True)
class PreflightSettings:
    """Settings of the upcoming run."""

    config: Path | None = None
    folder: str = "."
    backend: str = "auto"
    quick: bool | None = None
    """None: only if no node has an accelerator."""
    ranks_per_device: int = 1

    @classmethod
    def of(
        cls, config: Path | None, env: Mapping[str, str], quick: bool | None = None
    ) -> PreflightSettings:
        if config is None:
            return cls(quick=quick, folder=os.getcwd())
        from overland.config.load import load_config

        found = load_config(str(config), env=env).config
        folder = str(Path(found.job.dump_folder).expanduser().absolute())
        path, comm = config.expanduser().absolute(), found.comm
        return cls(path, folder, comm.backend, quick, comm.ranks_per_device)

    def of_groups(self) -> Message:
        """Returns what a task needs to open a process group as training does."""
        return {"backend": self.backend, "ranks_per_device": self.ranks_per_device}


def preflight(
    launch: Sequence[str],
    nodes: Sequence[str],
    tasks_per_node: int,
    job: PreflightSettings,
    env: Mapping[str, str] = os.environ,
) -> Report:
    """Tests the nodes with tasks that `launch` starts, as it would start training; raises a
    ClusterError if none started at all. `launch`: the command of the ranks, up to and including
    `… -m overland`."""
    require_one_machine(len(nodes), job)
    here = (env.get("SLURMD_NODENAME"), socket.gethostname())
    others = [node for node in nodes if node not in here]
    with closing(Switchboard(others or nodes, env)) as board:
        started = start.with_launch(launch, {**env, **board.environment()})
        return conduct(board, started, nodes, tasks_per_node, job)


def preflight_here(
    num_tasks: int, job: PreflightSettings, env: Mapping[str, str] = os.environ
) -> Report:
    """Tests only this machine."""
    with closing(Switchboard([], {})) as board:
        started = start.here(num_tasks, {**env, **board.environment()})
        return conduct(board, started, 1, num_tasks, job)


def preflight_among_ranks(
    world: World, job: PreflightSettings, env: Mapping[str, str] = os.environ
) -> Report | None:
    """Returns the report on the first rank, None on the others. The address goes through the
    world's store, where anyone who reaches it can write; who answers there must know the key."""
    from torch.distributed import PrefixStore

    require_one_machine(world.num_nodes, job)
    key = hmac.new(secret_of(env), NAME.encode(), "sha256").hexdigest()
    store = PrefixStore(NAME, open_store(world, START_SECONDS))
    if not world.is_first:
        address = store.get(NAME).decode(errors="replace")
        os.environ |= {ADDRESS: address, KEY: key}
        try:
            run_task()
        except ConnectionRefusedError as error:
            raise ClusterError(
                f"{address}, the address of the first rank: {error}. Another program has written "
                f"this address, or the ranks have different secrets; set {SECRET} to the same "
                "random characters for all of them"
            ) from None
        return None
    nodes = _nodes(world, env)
    with closing(Switchboard(_others(world, nodes, env), env, key)) as board:
        store.set(NAME, board.environment()[ADDRESS])
        started = start.first_task({**env, **board.environment()})
        return conduct(board, started, nodes, world.local_size, job)


def require_one_machine(num_nodes: int, job: PreflightSettings) -> None:
    """Raises if ranks are to share devices on several nodes, as training would."""
    if job.ranks_per_device > 1 and num_nodes > 1:
        why = f"ranks share GPUs of one machine only, and there are {num_nodes} nodes"
        raise ClusterError(refusal_to_share(job.ranks_per_device, why))


def conduct(
    board: Switchboard,
    started: Started,
    nodes: Sequence[str] | int,
    tasks_per_node: int,
    job: PreflightSettings,
) -> Report:
    """Tests with tasks that are starting; `nodes` may be just their number, if the names are not
    known. Always ends what was started."""
    progress = Phases()
    crew = Crew(board, started, nodes, tasks_per_node, progress)
    try:
        return _Conductor(crew, job).conduct()
    finally:
        crew.dismiss()
        started.stop()
        progress.close()


class _Conductor:
    def __init__(self, crew: Crew, job: PreflightSettings) -> None:
        self.crew, self.job = crew, job
        self.report = Report()
        self.findings: dict[str, list[str]] = defaultdict(list)
        self.facts: dict[str, dict[Place, Message]] = {}

    def conduct(self) -> Report:
        began = time.monotonic()
        crew, report = self.crew, self.report
        crew.gather()
        quick, with_torch = self._decide()
        clocks = self._ask("clock", crew.first_on_each())
        self._blame(judge.clocks(clocks))
        if with_torch:
            self._ask("torch", crew.alive())
        self._compare_versions(with_torch)
        disks = self._ask(
            "disk",
            crew.first_on_each(),
            folder=self.job.folder,
            num_bytes=QUICK_DISK_BYTES if quick else DISK_BYTES,
        )
        self._blame(judge.disks(disks))
        bounds = self._test_devices(with_torch)
        self._test_links({**self.job.of_groups(), "do": "link", "torch": not quick}, bounds.link)
        if not quick and not report.failure:
            self._test_sum()
        self._finish(quick)
        report.seconds = time.monotonic() - began
        return report

    def _decide(self) -> tuple[bool, bool]:
        """Returns whether to test quickly, and whether torch is needed."""
        accelerators = any(task.has_accelerator for task in self.crew.alive())
        quick = not accelerators if self.job.quick is None else self.job.quick
        return quick, accelerators or not quick

    def _compare_versions(self, with_torch: bool) -> None:
        path = str(self.job.config) if self.job.config else None
        answers = self._ask("versions", self.crew.first_on_each(), config=path, torch=with_torch)
        self._blame(judge.interfaces(answers))
        findings, notes = judge.versions(answers, measure_versions(path, with_torch=False))
        self._blame(findings)
        self.report.notes += notes

    def _test_devices(self, with_torch: bool) -> Bounds:
        answers = self._ask("device", self.crew.alive(), torch=with_torch)
        kinds = {facts.get("kind") for facts in answers.values()}
        bounds = judge.ACCELERATOR if "cuda" in kinds else judge.CPU
        slow = {node for node, _ in judge.rates(answers, bounds)}
        if slow:  # again, now that the others are idle
            again = [task for task in self.crew.alive() if task.node in slow]
            for place, facts in self._ask("device", again, torch=with_torch).items():
                answers[place] = judge.faster(answers[place], facts)
            self.facts["device"] = answers
        self._blame(judge.devices(answers, self.job.ranks_per_device))
        if why := judge.sharing(answers, self.job.ranks_per_device):
            self.report.failure = why
        if note := judge.uncompared(answers, self.job.ranks_per_device):
            self.report.notes.append(note)
        self._blame(judge.products(answers))
        self._blame(judge.rates(answers, bounds))
        return bounds

    def _test_links(self, order: Message, slow: float) -> None:
        """Tests links in all rounds. A link below the fraction `slow` of the median is bad."""
        plan = judge.pairings([node for node in self.crew.nodes if not self._is_bad(node)])
        first = [
            match
            for number, pairs in enumerate(plan, start=1)
            for match in self._test_pairs(pairs, number, f"round {number} of the links", order)
        ]
        last = "the extra round of the links"
        again = self._test_pairs(judge.retrial(first, slow), len(plan) + 1, last, order)
        findings, notes = judge.links(first, again, slow)
        self._blame(findings)
        self.report.notes += notes
        self.report.matches = first + again

    def _test_pairs(
        self, wanted: Sequence[Pair], number: int, what: str, order: Message
    ) -> list[Match]:
        """Tests all pairs of a round at once, each task with its counterpart on the other node."""
        pairs = [pair for pair in wanted if not any(map(self._is_bad, pair))]
        if not pairs:
            return []
        crew, lost_before = self.crew, set(self.crew.lost)
        tasks = {task.place: task for task in crew.alive()}
        locals_ = range(crew.tasks_per_node)
        groups = [[tasks[node, local] for node in pair] for pair in pairs for local in locals_]
        crew.progress.begin(what, 2 * len(groups))
        answers = crew.ask_together(groups, order, what, LIMITS["link"])
        partner = dict(pairs) | {b: a for a, b in pairs}
        for node in (set(crew.lost) - lost_before) & partner.keys():  # an unpaired node may end too
            crew.lost[node] += f", with {partner[node]}"
        return [
            judge.match_of(
                pair, number, {(n, i): answers.get((n, i), {}) for n in pair for i in locals_}
            )
            for pair in pairs
            if not set(pair) & set(crew.lost)  # the partner is not to blame for a lost node
        ]

    def _test_sum(self) -> None:
        tasks = [task for task in self.crew.alive() if not self._is_bad(task.node)]
        if len(tasks) < 2:
            return
        self.crew.progress.begin("all-reduce", len(tasks))
        order = {"do": "reduce", **self.job.of_groups()}
        seconds = sum_limit(len(tasks))
        answers = self.crew.ask_together([tasks], order, "the all-reduce", seconds)
        asked = [task.place for task in tasks]
        self.report.all_reduce, self.report.failure = judge.all_reduce(asked, answers)

    def _ask(self, do: str, tasks: Sequence[Task], **details: object) -> dict[Place, Message]:
        """Runs one phase, and keeps the measurements for the report."""
        self.crew.progress.begin(do, len(tasks))
        orders = {task: {"do": do, **details} for task in tasks}
        answers = self.crew.ask(orders, f"the {do} test", LIMITS[do])
        self._blame(judge.errors(answers, do))
        self.facts[do] = answers
        return answers

    def _blame(self, findings: Iterable[Finding]) -> None:
        for node, reason in findings:
            if reason not in self.findings[node]:
                self.findings[node].append(reason)

    def _is_bad(self, node: str) -> bool:
        return node in self.crew.lost or bool(self.findings.get(node))

    def _finish(self, quick: bool) -> None:
        report, crew = self.report, self.crew
        report.nodes, report.quick = list(crew.nodes), quick
        for node in crew.nodes:
            reasons = [*self.findings.get(node, []), *filter(None, [crew.lost.get(node)])]
            if reasons:
                more = len(reasons) - MOST_REASONS
                told = [*reasons[:MOST_REASONS], *([f"and {more} more"] if more > 0 else [])]
                report.bad[node] = "; ".join(told)
        for phase in ("clock", "versions", "disk", "device"):
            for (node, local), facts in self.facts.get(phase, {}).items():
                report.measured.setdefault(node, {}).setdefault(phase, {})[local] = facts


def sum_limit(num_tasks: int) -> float:
    """Returns how many seconds the all-reduce of this many tasks may take."""
    return LIMITS["reduce"] + SECONDS_PER_RANK * num_tasks


def _nodes(world: World, env: Mapping[str, str]) -> list[str] | int:
    """Returns the nodes' names under srun, otherwise their number: they report names later."""
    names = expand_hosts(env["SLURM_STEP_NODELIST"]) if "SLURM_STEP_NODELIST" in env else []
    return names if len(names) == world.num_nodes else world.num_nodes


def _others(world: World, nodes: list[str] | int, env: Mapping[str, str]) -> list[str]:
    """Returns hosts that are reached over the network that all nodes share."""
    if world.num_nodes == 1:
        return []
    if not isinstance(nodes, int):
        return [node for node in nodes if node != node_name(env)]
    address = world.rendezvous.address if world.rendezvous else env["MASTER_ADDR"]
    return [reachable(address)]
