"""The training loop: batch, step, log, validate, save, until the last step or a request to stop;
and the reaction to a loss spike (skip or rewind).

Anything that can take long first enters its phase of the heartbeat, so that an observer knows what
each rank is doing. A phase lasts until the next one is entered.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from overland.data.batch import Batch, batches, read_ahead
from overland.data.windows import Exhausted
from overland.errors import TrainingError
from overland.parallel.comm import from_first_rank
from overland.plugins import plugin
from overland.training.callbacks import Record
from overland.training.health import BadSteps
from overland.training.records import Meter, write_plan
from overland.training.resume import resume_newest
from overland.training.run import Run
from overland.training.saving import (
    LedgerWriter,
    check_last_save,
    is_due,
    report_saves,
    retry_final_save,
    save,
    save_is_due,
    save_while_training,
)
from overland.training.schedule import learning_rate
from overland.training.step import StepResult, train_step
from overland.training.stop import Clock, StopRequest, Wish
from overland.training.validate import sets_due, validate
from overland.world.heartbeat import Phase

Data = Generator[Batch, None, None]


def train(run: Run) -> bool:
    """Trains to the last step or until asked to stop; returns whether it reached the last step."""
    config, progress = run.config, run.progress
    steps = config.training.steps
    bad_steps = BadSteps(config.health.max_bad_steps)
    clock = Clock(config.checkpoint, run.folder.root) if run.world.is_first else None
    meter, ledger = Meter(run), LedgerWriter(run)
    if run.world.is_first:  # after the ledger's mark, which makes the old plan void
        write_plan(run)
        if progress.step < steps:  # it was done with fewer steps, or resumed an earlier one
            run.folder.done.unlink(missing_ok=True)
    data = open_data(run)

    with StopRequest(clock, config.comm.train_timeout_seconds) as stop:
        try:
            run.call("on_start")
            while progress.step < steps:
                stop.ask()
                batch = wait_for_batch(run, data, meter, ledger)
                result = train_step(run, batch, run.guard)
                ledger.note(batch, progress.step + 1, progress.batch)
                progress.advance(result.num_units)
                bad_steps.note(progress.step, result.not_finite, result.is_empty)
                run.call("on_step")

                is_logged = is_due(progress.step, config.metrics.log_freq, steps, first=True)
                if is_logged or bad_steps.is_due:
                    log(run, result, meter, bad_steps)
                    ledger.write()
                if result.spiked:
                    data = answer_spike(run, data, result, ledger)
                held_out = None
                if due := sets_due(run):
                    held_out = validate(run, due)
                    run.call("on_validation", held_out)
                    meter.restart(run)

                wish = stop.agreed()
                if wish is Wish.GIVE_UP:
                    run.store.wait()  # until this rank also knows how the save ended
                    check_last_save(run)
                if config.checkpoint.enable and save_is_due(run, wish, held_out):
                    save_while_training(run, ledger, clock, wish, held_out)
                report_saves(run, run.store.poll(), clock)
                if wish.stops and clock is not None:
                    clock.stop_file.unlink(missing_ok=True)  # its request has been served
                if wish.stops and progress.step < steps:
                    ledger.write()
                    run.say(f"stopping after step {progress.step}: {stop.reason(wish)}")
                    retry_final_save(run, ledger, clock, stop, preempt=True)
                    return False
            retry_final_save(run, ledger, clock, stop, preempt=False)
        finally:
            end(run, data, ledger, clock)
    return True


def end(run: Run, data: Data, ledger: LedgerWriter, clock: Clock | None) -> None:
    """Closes what the loop has opened, even after an error. Waits for the last save."""
    run.beat.enter(Phase.ENDING, run.progress.step)
    data.close()
    for dataset in (run.dataset, *run.validation_sets):
        dataset.close()
    report_saves(run, run.store.finish(), clock)
    ledger.end()
    run.call("on_end")
    run.store.close()


def conclude(run: Run) -> None:
    """Exports the weights after the last step, then marks the run folder as done."""
    steps = run.config.training.steps
    if run.config.checkpoint.last_save_in_hf and from_first_rank(run.folder.steps_done() < steps):
        run.beat.enter(Phase.ENDING, doing=f"writing {run.folder.hf}")
        plugin("exports").export_hf(run)
    if run.world.is_first:
        try:
            run.folder.mark_done(run.progress.step, is_saved=run.config.checkpoint.enable)
        # Everything is saved; the next session finds nothing to do, and marks it.
        except OSError as error:
            run.say(f"{run.folder.done} cannot be written: {error.strerror}")


def open_data(run: Run) -> Data:
    """Yields this rank's share of every batch from `progress.batch` on, copied to the device ahead
    of time."""
    mesh, rows = run.mesh, run.dataset.rows
    shares = batches(rows, run.progress.batch, mesh.dp_rank, mesh.dp_size, run.device)
    return read_ahead(shares, run.config.data.read_ahead)


def wait_for_batch(run: Run, data: Data, meter: Meter, ledger: LedgerWriter) -> Batch:
    """Returns the next batch. If the data is exhausted, saves the progress so far before
    raising."""
    run.beat.enter(Phase.DATA, run.progress.step)
    try:
        return next_batch(data, meter)
    except Exhausted:
        run.beat.enter(Phase.SAVING)
        if run.config.checkpoint.enable and run.progress.step > max(run.saved_step, 0):
            save(run, ledger)
        raise


def next_batch(data: Data, meter: Meter) -> Batch:
    started = time.perf_counter()
    batch = next(data)
    meter.waited(time.perf_counter() - started)
    return batch


def log(run: Run, result: StepResult, meter: Meter, bad_steps: BadSteps) -> None:
    run.beat.enter(Phase.REPORTING)
    loss = result.loss.item()  # waits for the device, so that the meter sees complete steps
    skipped, empty = bad_steps.check()
    record: Record = {
        "step": run.progress.step,
        "loss": loss,
        "grad_norm": result.grad_norm.item(),
        "lr": learning_rate(run.progress.step - 1, run.config),
        run.measure.unit: run.progress.tokens,
        **dict(zip(run.objective.metrics, result.metrics.tolist(), strict=True)),
        **run.inner.logged(run.global_batch_size),
        **meter.read(run),
        "skipped_steps": len(skipped),
        "empty_steps": len(empty),
        "skipped_documents": run.dataset.num_skipped,
    }
    run.call("on_log", record)
    for steps, why in ((skipped, "not finite"), (empty, "nothing in the batch has a loss weight")):
        if steps:
            run.say(f"skipped because {why}: step {', '.join(map(str, steps))}")


def answer_spike(run: Run, data: Data, result: StepResult, ledger: LedgerWriter) -> Data:
    """Reports a loss spike, whose update has already been skipped. With `rewind`, also returns to
    the newest checkpoint and continues with unseen batches. Returns the data to train on."""
    run.beat.enter(Phase.SAVING)  # it may wait for a save and read it back
    what = f"loss spike at step {run.progress.step} ({result.loss.item():.4f})"
    assert run.guard is not None
    if run.config.health.spike_guard == "skip":
        run.say(f"{what}: step skipped")
        return data
    run.store.wait()
    next_unseen, remembered = run.progress.batch, run.guard.to_json()
    if not resume_newest(run, run.say):
        raise TrainingError(
            f"{what}, but there is no checkpoint to rewind to: lower checkpoint.interval"
        )
    run.progress.batch = next_unseen
    run.guard.restore(remembered)  # what it knows about the loss still holds
    back = f"rewound to step {run.progress.step}, continuing with batch {next_unseen}"
    run.say(f"{what}: {back}")
    ledger.start_again(run.progress.step, run.progress.batch)
    run.call("on_rewind")
    if run.world.is_first:
        write_plan(run)
    data.close()
    return open_data(run)
