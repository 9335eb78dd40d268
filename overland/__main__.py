import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    # Added by `torchrun … -m overland`: a user's random.py there would replace Python's own.
    del sys.path[0]

from overland.cli.main import main

main()
