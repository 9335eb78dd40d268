"""Measures and samples models: perplexity, the tasks of lm-evaluation-harness, generation, chat.

`main.py` is the way in. `model.py` opens a model from any checkpoint; `score.py` computes
log-probabilities of many texts at once, for `perplexity.py` and `tasks.py`; `generate.py` writes
texts with a cache (`cache.py`). Finished parts are kept in `results.py`, so that an interrupted
evaluation resumes.
"""
