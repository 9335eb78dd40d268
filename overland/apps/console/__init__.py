"""What a run displays: the table at its start, the progress bar, TensorBoard and Weights & Biases,
the summary at its end, and the README of its folder.

Start with `show.py`, which the trainer finds by name.
"""
