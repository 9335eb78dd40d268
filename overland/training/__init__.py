"""A run, from its config to its last step.

Start with `main.py`, the one way in. `build.py` puts the run together (model, data, optimizer,
store; `run.py` has its type) and `resume.py` gives it its state; `loop.py` trains, one step of
`step.py` at a time, and calls `callbacks.py` for everything optional: the console, metrics,
profiles. `stop.py` ends it early.
"""
