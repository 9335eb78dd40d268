"""A run, from its config to its last step.

Read one way: `main.py`, the one way in, joins the ranks; `build.py` puts the run together (model,
data, optimizer, store; `run.py` has its type); `resume.py` gives it the state of a checkpoint, or
`start.py` given weights; `loop.py` trains, one step of `step.py` at a time; `saving.py` saves what
`state.py` lists. `callbacks.py` is called for everything optional; what only shows the run is in
apps/console. `stop.py` ends it early.
"""
