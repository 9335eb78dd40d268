"""The file `done`, which tells job scripts that nothing is left to do."""

from pathlib import Path

from overland.apps.proofs.pool import RankPool
from overland.apps.watch.status import Watch
from overland.run_folder import RunFolder
from tests.jobs import losses, run_job, tiny_job


def test_the_marker_is_there_when_and_only_when_all_steps_are_done(
    ranks: RankPool, tmp_path: Path
) -> None:
    saved = {"enable": True, "async_mode": "disabled"}
    job = tiny_job(tmp_path, training={"steps": 3}, checkpoint=saved)
    folder = RunFolder(job)
    assert folder.steps_done() == 0
    ranks.run(1, losses, job)
    assert folder.done.read_text() == "3\n"

    longer = tiny_job(tmp_path, training={"steps": 6}, checkpoint=saved)
    (tmp_path / "STOP").touch()
    ranks.run(1, losses, longer)
    assert folder.steps_done() == 0
    ranks.run(1, losses, longer)
    assert folder.steps_done() == 6


def test_the_marker_says_if_nothing_is_saved(ranks: RankPool, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, training={"steps": 2}, checkpoint={"enable": False})
    ranks.run(1, losses, job)
    number, words = RunFolder(job).done.read_text().splitlines()
    assert number == "2"
    assert "checkpoint.enable = false" in words
    assert RunFolder(job).steps_done() == 2
    seen = Watch(tmp_path).look()
    assert (seen.state, seen.because) == ("finished", words)


def test_a_marker_that_a_full_disk_does_not_take_is_told(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / ".done.part").symlink_to("/dev/full")
    (recorder,) = ranks.run(1, run_job, tiny_job(tmp_path, training={"steps": 1}))
    assert f"{tmp_path}/done cannot be written: No space left on device" in recorder.messages
