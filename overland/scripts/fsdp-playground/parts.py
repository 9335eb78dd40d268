"""Imported on every rank for train.py: registers the loaders in datas/, the metric of C4's
perplexity, and the `slt` package, if it is on PYTHONPATH."""

from importlib.util import find_spec

import datas
import datas.C4.c4_eval

datas.register_loaders()
datas.C4.c4_eval.register()
if find_spec("slt"):
    import slt  # noqa: F401 (it registers a method: register_mask("slt", …))
