"""Callbacks for everything optional, so that the loop stays simple.

A callback overrides the hooks it needs. Every rank has its own instance and calls it at the same
point; a callback that only some ranks need has a factory that returns None on the others. A user's
module (`job.custom_import`) adds its own with `register_callback`.

Built-in ones are in builtin_callbacks.py, console.py, metrics.py and compile_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overland.arguments import refused

if TYPE_CHECKING:
    from overland.checkpoint.store import Outcome
    from overland.training.run import Run


Record = dict[str, Any]


class Callback:
    """Hooks of a run; each does nothing unless overridden."""

    def __init__(self, run: Run) -> None:
        """Called when the run is built, before `on_start`."""

    def on_start(self, run: Run) -> None:
        """Called when everything is built (and resumed), just before the first step."""

    def on_step(self, run: Run) -> None:
        """Called after every step. `run.progress.step` already includes it."""

    def on_log(self, run: Run, record: Record) -> None:
        """Called every `metrics.log_freq` steps with loss, learning rate, speed and more, as plain
        numbers."""

    def on_validation(self, run: Run, record: Record) -> None:
        """Called with `validation/NAME/loss` and `validation/NAME/perplexity` of each set that was
        due (and with the loss as `validation_loss/NAME`, its name in earlier versions)."""

    def on_save(self, run: Run, saved: Outcome) -> None:
        """Called when a checkpoint has been committed. Saves end in the background, so ranks learn
        of it at different steps: never wait for another rank here."""

    def on_rewind(self, run: Run) -> None:
        """Called when the run went back to an earlier step (`run.progress.step`), as with
        `health.spike_guard = "rewind"`: what was logged for later steps is void."""

    def on_message(self, run: Run, message: str) -> None:
        """Called with something the user should know, such as a skipped step."""

    def on_end(self, run: Run) -> None:
        """Called last, even when training stops early or fails."""


Factory = Callable[["Run"], Callback | None]

_factories: list[Factory] = []


def register_callback(factory: Factory) -> Factory:
    """Adds a callback to every run; usable as a decorator on the callback's class or a function."""
    is_other_class = isinstance(factory, type) and not issubclass(factory, Callback)
    if is_other_class or not callable(factory):
        expected = "a subclass of overland.Callback, or a function that takes a run and returns one"
        raise refused("register_callback: factory", factory, expected)
    _factories.append(factory)
    return factory


def user_callbacks(run: Run) -> list[Callback]:
    made = [callback for factory in _factories if (callback := factory(run)) is not None]
    for callback in made:
        if not isinstance(callback, Callback):
            raise refused("a registered callback", callback, "an overland.Callback, or None")
    return made
