"""Callbacks for everything optional, so that the loop stays simple.

A callback overrides the hooks it needs. Every rank has its own instance and calls it at the same
point; a callback that only some ranks need has a factory that returns None on the others. A user's
module (`job.custom_import`) adds its own with `register_callback`.

Built-in ones are in builtin_callbacks.py, console.py, metrics.py and compile_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable

from overland.arguments import refused
from overland.training.run import Callback, Record, Run

__all__ = ["Callback", "Record", "register_callback", "user_callbacks"]

Factory = Callable[[Run], Callback | None]

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
