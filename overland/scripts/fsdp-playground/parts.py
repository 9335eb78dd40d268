"""What train.py has Overland import on every rank: the loaders in datas/, the name that C4's
perplexity is logged under, and the `slt` package, where it is on PYTHONPATH."""

from importlib.util import find_spec

import datas
import datas.C4.c4_eval

datas.register_loaders()
datas.C4.c4_eval.register()
if find_spec("slt"):
    import slt  # noqa: F401 (it registers a method: register_mask("slt", …))
