"""Makes a plain model parallel, from outside.

`apply.py` has the fixed order; `mesh.py` the axes and how ranks are arranged along them. Each axis
is a file: `sharding.py`, `tensor.py`, `context.py`, `pipeline.py`. `plans` says how a kind of model
is split; `blocks.py` recomputes and compiles blocks; `whole.py` runs a model without stages.
`comm.py` joins the process group, and has the collectives of everything else.
"""
