"""`python train_stub.py test_config_training.yaml`, alone or under srun or mpirun."""

import os
import sys

from overland.cli.main import app

if __name__ == "__main__":
    os.environ.setdefault("NGPU", "1")  # without a launcher, run a single process
    app(["train", *sys.argv[1:]])
