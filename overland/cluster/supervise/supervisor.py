"""The supervisor runs on the first node of a job, alongside the ranks: it starts them, monitors
them, and restarts them from the last checkpoint if a rank or a node is lost.

1. Preflight tests every node of the allocation; bad ones are excluded.
2. As many good nodes as training needs are chosen; the others are spares.
3. The ranks are started, and monitored through their heartbeats, their output and Slurm.
4. When they end, the cause is determined, and `policy` decides: restart them, with or without the
   node to blame; give the nodes back to get others; or stop the run and its chain of jobs, because
   the same would happen again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from overland.cluster import slurm_jobs
from overland.cluster.submit import write_private
from overland.cluster.supervise import policy
from overland.cluster.supervise.attempt import (
    HANG_UP_SECONDS,
    Attempt,
    Watched,
    job_id,
    keep_stacks,
    odd_ranks,
    rank_environment,
)
from overland.cluster.supervise.events import (
    Logbook,
    furthest_step,
    of_submission,
    read_events,
    tell,
)
from overland.cluster.supervise.faults import Fault, with_recorded_ranks
from overland.cluster.supervise.policy import Answer, Failure
from overland.cluster.supervise.roster import Roster, shun_bad_nodes
from overland.cluster.supervise.supervised import Supervised, room_needed
from overland.cluster.supervise.watchdog import SILENT_SECONDS, Watchdog
from overland.cluster.wire import Switchboard
from overland.errors import ClusterError, Kind
from overland.processes import allow_open_files
from overland.run_folder import FAULTS, PREFLIGHT, STOPPED
from overland.world.flight_recorder import NAME, find_wait, read_records
from overland.world.heartbeat import node_name
from overland.world.signals import SIGNALS

AWAY_SECONDS = 5.0
ROLL_CALL_SECONDS = SILENT_SECONDS + HANG_UP_SECONDS
LOOK_SECONDS = 0.2
STACKS_SECONDS = 20.0
ROOM_SECONDS = 5.0  # between checks of a full disk


Ending = Literal["finished", "stopped", "failed"]


@dataclass
class Supervisor:
    job: Supervised
    env: Mapping[str, str]
    roster: Roster
    logbook: Logbook
    asked_to_end: int = 0
    """The number of the signal that asked to end; 0 if none did."""
    why_asked: str = ""
    number: int = 0
    """The number of the current attempt."""
    furthest: int = 0
    """The last step that any attempt has completed."""
    furthest_at: float = field(default_factory=time.monotonic)
    before: int = 0
    """The value of `furthest` before this attempt."""
    begun: int = 0
    """The step of the checkpoint that this attempt started from."""
    faults: list[Fault] = field(default_factory=list)
    """Faults since the last new step."""
    streak: list[Failure] = field(default_factory=list)
    """The chain's failures since its last new step."""
    session: int = 1
    """The number of this job within the chain."""
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    # One session, from start to end

    def run(self) -> int:
        """Supervises until the end; returns the exit code of the job."""
        untested = self.job.preflight
        while True:
            if untested:
                self.test_nodes()
            if reason := self.reason_to_end():  # one may have come up meanwhile
                return self.stop(reason)
            nodes = self.roster.choose()
            if nodes is None:
                return self.not_enough_nodes()
            how = self.attempt(nodes)
            self.note_saved_step()
            if not isinstance(how, Fault):
                why = f": {self.why_asked}" if self.why_asked and how == "stopped" else ""
                what = f"step {self.furthest}{why}"
                return self.stop(what) if how == "stopped" else self.end(how, what)
            answer = self.answer(how)
            if answer.action == "stop":
                return self.end("failed", answer.reason)
            if answer.action == "requeue":
                return self.not_enough_nodes()
            if answer.action == "give back":
                self.end("stopped", answer.reason, blamed=policy.suspects(self.streak))
                return 1  # this job made no progress, whatever the next one will do
            if answer.action == "next session":
                return self.stop(answer.reason)
            if self.job.lacks_room(how):
                self.wait_for_room()
            self.pause(answer.pause_seconds)
            untested = self.job.preflight and not how.nodes  # tests may find the culprit

    def test_nodes(self) -> None:
        from overland.cluster.preflight.conduct import PreflightSettings, preflight

        self.logbook.live(state="preflight", attempt=self.number, step=self.furthest)
        nodes = self.roster.good
        launch = slurm_jobs.srun_on(self.job.launch, nodes, self.job.tasks_per_node)
        try:
            settings = PreflightSettings.of(self.job.config, self.env)
            report = preflight(launch, nodes, self.job.tasks_per_node, settings, self.env)
        except ClusterError as error:
            tell(f"preflight: {error}")
            self.logbook.write("preflight", seconds=0.0, bad={}, error=str(error))
            return  # the attempt itself will show the problem
        if set(report.bad) >= set(nodes):
            words = ", ".join(sorted(set(report.bad.values())))
            tell(
                "preflight: every node fails, so the nodes are not to blame; using all of them "
                f"anyway: {words}"
            )
            report.bad.clear()
        for node, reason in report.bad.items():
            tell(f"preflight: {node} is excluded: {reason}")
            self.roster.exclude(node, reason)
        self.logbook.write("preflight", seconds=report.seconds, bad=report.bad)
        for words in filter(None, [report.failure, *report.notes]):
            tell(f"preflight: {words}")
        tell(f"preflight: {len(self.roster.good)} good nodes, in {report.seconds:.0f} s")
        with contextlib.suppress(OSError):
            report.save(self.job.run / PREFLIGHT)

    def attempt(self, nodes: list[str]) -> Fault | Literal["finished", "stopped"]:
        """Trains on these nodes; returns "finished", "stopped", or what went wrong."""
        self.number += 1
        self.begun = self.job.newest_checkpoint()
        self.logbook.write("attempt", attempt=self.number, nodes=nodes, from_step=self.begun)
        tell(f"attempt {self.number} from step {self.begun}, on {', '.join(nodes)}")
        self.before = self.furthest
        launch = slurm_jobs.srun_on(self.job.launch, nodes, self.job.tasks_per_node)
        board = Switchboard([node for node in nodes if node != self.roster.batch_host], self.env)
        command = [*launch, "train", str(self.job.config)]
        folder = self.fault_folder()
        with contextlib.suppress(OSError):  # NCCL writes here when it times out
            folder.mkdir(parents=True, exist_ok=True)
        attempt = Attempt(
            command, rank_environment(self.env, board, self.number, folder), len(nodes)
        )
        dog = Watchdog(self.job.hang_seconds, nodes, started=time.monotonic())
        watched = Watched(attempt, dog, board, here=self.roster.batch_host)
        try:
            self.watch(watched)
        finally:
            watched.close()
            if attempt.code() is None:
                watched.ask_all({"kill": True})  # Slurm's controller may take minutes to do so
            attempt.end()
            self.hear_all(watched)
            watched.ask_all({"bye": True})
            board.close()
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty
        if self.job.is_done():
            return "finished"
        if attempt.findings.stopped():
            return "stopped"
        num_ranks = len(nodes) * self.job.tasks_per_node
        wait = find_wait(read_records(folder / NAME), num_ranks)
        where = {rank: heard.node for rank, heard in dog.ranks.items()}
        return with_recorded_ranks(attempt.findings.fault(), wait, where)

    def watch(self, watched: Watched) -> None:
        """Monitors the ranks until they have ended or must be ended."""
        attempt, dog, findings = watched.attempt, watched.dog, watched.attempt.findings
        passed_on, looked = False, time.monotonic()
        unheard: list[str] = []
        while True:
            if time.monotonic() - looked > AWAY_SECONDS:  # this process was paused, for example
                watched.forgive()
            looked = time.monotonic()
            self.hear_all(watched)
            if attempt.code() is not None or dog.all_have_ended():
                return
            if self.asked_to_end and not passed_on:
                passed_on = attempt.signal(signal.SIGTERM)
                self.note_signal()
            findings.lost.extend(watched.lost_nodes())
            if findings.lost:
                self.find_all_lost(watched)
                return
            if watched.is_to_end():
                return
            unheard = self.logbook.note_silent_nodes(watched.silent_nodes(), unheard, self.furthest)
            if dog.late_ranks():
                findings.hang = self.look_into(watched)
                if findings.hang is not None:
                    return
            self.logbook.note_slow_ranks(dog, self.number)
            usual = statistics.median(self._step_times) if self._step_times else None
            self.logbook.show(dog, self.number, self.begun, usual, bool(self.faults))
            time.sleep(LOOK_SECONDS)

    def find_all_lost(self, watched: Watched) -> None:
        """Waits until each remaining node has reported or is lost too: a switch or a rack takes
        several nodes down at once, and some are noticed before others."""
        now = since = time.monotonic()
        while watched.undecided_nodes(since) and now < since + ROLL_CALL_SECONDS:
            time.sleep(LOOK_SECONDS)
            self.hear_all(watched)
            watched.attempt.findings.lost.extend(watched.lost_nodes())
            now = time.monotonic()

    def look_into(self, watched: Watched) -> Fault | None:
        """Collects the stacks of all ranks to find the one that hangs; returns None if they have
        resumed meanwhile."""
        dog = watched.dog
        late = dog.late_ranks()
        seconds = max(late[0].age, late[0].quiet if late[0].is_moving else 0.0)
        tell(f"rank {late[0].rank} has made no progress for {seconds:.0f} s: dumping all stacks")
        watched.stacks.clear()
        watched.ask_all({"dump": True})
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and len(watched.stacks) < len(dog.ranks):
            self.hear_all(watched)
            time.sleep(LOOK_SECONDS)
        late = dog.late_ranks()
        try:
            path = keep_stacks(self.fault_folder(), watched.stacks, dog.ranks.values())
            tell(f"stacks saved to {path}")
        except OSError as error:
            tell(f"could not save the stacks: {error.strerror}")
        return dog.hang(late, odd_ranks(watched.stacks)) if late else None

    def answer(self, fault: Fault) -> Answer:
        is_shared = fault.kind is Kind.DISK and not self.job.is_disk_of_node(fault)
        excluded = [] if is_shared else self.roster.leave_out(fault)
        new = max(self.furthest - self.before, self.job.newest_checkpoint() - self.begun, 0)
        failure = Failure(
            fault.kind, fault.place, fault.nodes, new, bool(excluded), self.session, self.furthest
        )
        self.streak = policy.with_failure(self.streak, failure)
        answer = self.decide(fault)
        tell(f"{fault.kind}: {fault.what}" + ("; restarting" if not answer.reason else ""))
        self.logbook.write(
            "fault",
            attempt=self.number,
            **asdict(fault),
            step=self.furthest,
            new_steps=new,
            action=answer.action,
            excluded=excluded,
            seconds_to_notice=round(time.monotonic() - self.furthest_at, 1),
        )
        self.logbook.live(state="restarting", attempt=self.number, step=self.furthest)
        self.faults.append(fault)
        return answer

    def decide(self, fault: Fault) -> Answer:
        """Follows the policy, unless the job is about to end anyway."""
        answer = policy.decide(self.streak, self.job.max_failed_starts)
        if answer.action == "restart" and (reason := self.reason_to_end()):
            return Answer("next session", reason)
        if slurm_jobs.was_requeued(self.env):
            return Answer("next session", "the job was requeued")
        if answer.action == "restart" and self.roster.choose() is None:
            return Answer("requeue" if self.requeues() else "next session", "too few good nodes")
        if answer.action == "restart":
            return answer
        why = f" ({answer.reason})" if answer.reason else ""
        return Answer(answer.action, f"{fault.kind}: {fault.what}{why}")

    def reason_to_end(self) -> str:
        """Returns why to end before the last step without a fault, or "" to continue."""
        if self.asked_to_end:
            self.note_signal()
            return f"{self.why_asked}; the last checkpoint is kept"
        return "too little time is left in this job to restart" if self.is_late() else ""

    def note_signal(self) -> None:
        """Records at once why the job must end: Slurm may give this process only seconds."""
        if not self.why_asked:
            name = signal.Signals(self.asked_to_end).name
            self.why_asked = slurm_jobs.why_asked_to_end(self.env, name)
            tell(f"asked to end: {self.why_asked}")
            self.logbook.write("signal", signal=name, step=self.furthest, what=self.why_asked)

    def stop(self, what: str) -> int:
        """Ends this job before the last step, and says in its log how the run is resumed."""
        code = self.end("stopped", what)
        waiting = slurm_jobs.waiting_jobs(self.env)
        if waiting:
            tell(f"the next job of the chain, {waiting[0]}, resumes it")
        elif waiting is not None:
            script = self.job.config.with_suffix(".sh")
            tell(f"no job of the chain is left; to resume: sbatch {shlex.quote(str(script))}")
        return code

    def end(self, how: Ending, what: str, blamed: Sequence[str] = ()) -> int:
        self.logbook.write("end", how=how, step=self.furthest, what=what, suspects=list(blamed))
        self.logbook.live(state="ended", attempt=self.number, step=self.furthest)
        tell(f"{how}: {what}")
        if how == "failed":
            step = self.job.newest_checkpoint()
            words = f"{what}. Once that is fixed, submit the run again to resume from step {step}\n"
            with contextlib.suppress(OSError):  # queued jobs end at once until then
                write_private(self.job.run / STOPPED, words)
        if how == "stopped":
            shun_bad_nodes(self.job.run, self.env)
        return 1 if how == "failed" else 0

    def not_enough_nodes(self) -> int:
        """Ends this job, so that the next one gets other nodes."""
        out = "; ".join(f"{node}: {reason}" for node, reason in self.roster.out.items())
        what = f"{len(self.roster.good)} good nodes of {self.job.num_nodes} needed ({out})"
        self.end("stopped", f"{what}; the next job continues")
        if self.requeues():
            slurm_jobs.requeue(self.env)
            shun_bad_nodes(self.job.run, self.env)  # now that this job waits too
        return 1

    def requeues(self) -> bool:
        return self.job.requeue and slurm_jobs.may_requeue(self.env)

    # Messages from ranks and nodes

    def hear_all(self, watched: Watched) -> None:
        watched.hear()
        step = max(watched.dog.step, watched.attempt.findings.step)
        self.note_new_step(step, time.monotonic())

    def note_saved_step(self) -> None:
        """Learns from the run folder of steps that ended between two heartbeats."""
        step = max(self.job.steps_done(), self.job.newest_checkpoint())
        self.note_new_step(step, time.monotonic())

    def note_new_step(self, step: int, now: float) -> None:
        """Records a step that no attempt has reached before: earlier faults are recovered from."""
        if step <= self.furthest:
            return
        if self.faults:
            kind, count, lost = self.faults[-1].kind, len(self.faults), now - self.furthest_at
            more = f", the last of {count} faults," if count > 1 else ""
            tell(f"recovered from {kind}{more} at step {step}: {lost:.0f} s lost")
            facts = {"attempt": self.number, "kind": kind, "faults": count}
            self.logbook.write("recovered", **facts, lost_seconds=round(lost, 1), step=step)
        if self.furthest and not self.faults:
            self._step_times.append((now - self.furthest_at) / (step - self.furthest))
        self.faults.clear()
        self.furthest, self.furthest_at = step, now

    def is_late(self) -> bool:
        """Whether new ranks would have to stop before training starts."""
        end = slurm_jobs.job_end(self.env)
        return end is not None and end - time.time() < self.job.margin_seconds + 30

    def pause(self, seconds: float) -> None:
        """Waits for a fault that may be temporary."""
        until = time.monotonic() + seconds
        if seconds:
            tell(f"restarting in {seconds:.0f} s")
        while time.monotonic() < until and not self.reason_to_end():
            self.logbook.live(state="restarting", attempt=self.number, step=self.furthest)
            time.sleep(LOOK_SECONDS)

    def wait_for_room(self) -> None:
        """Waits until the disk has room, for at most as long as the job lasts."""
        checkpoints = self.job.checkpoints
        while not self.job.has_room() and not self.reason_to_end():
            needed = room_needed(checkpoints) / 1e9
            tell(f"{checkpoints}: waiting for {needed:.1f} GB of free space and quota")
            self.logbook.live(state="waiting for room", attempt=self.number, step=self.furthest)
            time.sleep(ROOM_SECONDS)

    def fault_folder(self) -> Path:
        return self.job.run / FAULTS / f"{job_id(self.env)}-{self.number}"


def supervise(job: Supervised, env: Mapping[str, str] = os.environ) -> int:
    """Supervises a job; returns the exit code of its script."""
    allocation, host = slurm_jobs.allocated_nodes(env), node_name(env)
    if len(allocation) < job.num_nodes:
        raise ClusterError(
            f"--nodes {job.num_nodes}: the job has only {len(allocation)} nodes; request more"
        )
    logbook = Logbook(job.run, env.get("SLURM_JOB_ID", ""))
    events_of_run = read_events(job.run)
    events = of_submission(events_of_run, str(job.config))
    supervisor = Supervisor(job, env, Roster(allocation, job.num_nodes, host), logbook)
    supervisor.furthest = max(furthest_step(events), job.newest_checkpoint())
    supervisor.streak, sessions = policy.read_streak(events)
    supervisor.session = sessions + 1
    supervisor.roster.avoid_bad_nodes(events_of_run)
    shun_bad_nodes(job.run, env)  # old entries expire
    allow_open_files()  # one connection per node
    logbook.write(
        "session",
        config=str(job.config),
        restart=int(env.get("SLURM_RESTART_COUNT") or 0),
        nodes=allocation,
        wanted=job.num_nodes,
        ends=slurm_jobs.job_end(env),
    )

    def remember(number: int, frame: FrameType | None) -> None:
        supervisor.asked_to_end = number

    for number in SIGNALS:
        signal.signal(number, remember)
    return supervisor.run()
