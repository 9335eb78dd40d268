"""A script of nanochat's, with what the model is given recorded:

python -m tests.comparison.nanochat CLONE MODULE [ARGUMENT …]
"""

from __future__ import annotations

import runpy
import sys

from tests.comparison import recorder  # noqa: F401  (records from here on)
from tests.peers import NANOCHAT, install

if __name__ == "__main__":
    install("nanochat", NANOCHAT, marker="rustbpe")
    _, clone, module, *arguments = sys.argv
    sys.path.insert(0, clone)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
