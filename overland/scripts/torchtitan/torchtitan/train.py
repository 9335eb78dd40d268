"""`torchrun … torchtitan/train.py --job.config_file F`, which runs `overland train`.

This folder is not a package: `import torchtitan` finds the real one, if it is installed.
"""

import os
import sys

from overland.cli.main import app

if __name__ == "__main__":
    # Python puts the script's folder on the path, where its contents could shadow packages.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if path != here]
    app(["train", *sys.argv[1:]])
