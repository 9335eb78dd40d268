"""Live views of runs in a terminal: `overland watch` follows one, `overland ls` lists many.

`status.py` reads what changes in a run folder, with the readers of `files.py`, and asks Slurm;
`view.py` draws it.
"""
