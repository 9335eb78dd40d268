"""The run that every trainer is given."""

from __future__ import annotations

STEPS, INTERVAL = 20, 5
BATCH = 16
"""Rows of a step, over all processes."""
SEQ_LEN = 64
NUM_TEXTS = 240
"""So that a trainer that takes a text per row begins the second epoch in step 16."""
LR = 1e-2
SEED = 7
VOCABULARY = 640
