"""Checkpoints: committed or not there at all.

`store.py` is what a run uses: it copies the state (`snapshot.py`), writes it in the background
(`write.py`, `plan.py`) and commits it by a rename. `read.py` reads any part of it in any layout and
verifies every byte; `format.py` is what is on the disk. `folder.py` lists, keeps and deletes.
`lazy.py` is what a run sees of checkpoints in other formats, which are in apps/convert, and of
frozen weights that stay where they were loaded from.
"""
