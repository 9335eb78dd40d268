"""What `overland check` and `overland submit` find out about a run without starting it: what would
stop it before its first step (`rehearsal.py`; `look.py` reads the beginning of the data), its size
and layout (`planned.py`), and one step on fake tensors (`fake_step.py`). Also what a run with a
model or an objective of one's own is checked for before its first step (`separate_rows.py`)."""
