"""Downloads the data of the evaluation tasks, with `overland fetch tasks`; its flags may follow."""

import sys

from overland.cli.main import run

run("fetch", "tasks", "@frontier", *sys.argv[1:])
