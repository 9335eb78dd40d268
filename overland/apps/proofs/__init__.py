"""Evidence that runs compute what they should: `overland prove`.

`layout.py` trains a tiny model under each layout of `layouts.py` and compares it with one process;
`resume.py` does so across checkpoints, and `data.py` replays the ledger of a real run. Ranks live
in a pool (`pool.py`); tables are resumable (`evidence.py`).
"""
