"""`torchrun … torchtitan/train.py --job.config_file F`, which is `overland train`.

This folder is no package: `import torchtitan` finds the real one, where it is installed.
"""

import sys

from overland.cli.main import app

if __name__ == "__main__":
    sys.path.pop(0)  # Python puts this folder there, and names in it are nobody else's
    app(["train", *sys.argv[1:]])
