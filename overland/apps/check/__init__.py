"""What `overland check` and `overland submit` find out about a run without starting it: what would
stop it before its first step (`rehearsal.py`), its size and layout (`planned.py`), and one step on
fake tensors (`fake_step.py`)."""
