"""The command: one thin module per verb, which parses options and calls the package below.

`main.py` lists the verbs. Heavy imports are inside of functions, so that `--help` is fast;
`common.py` turns errors into one sentence and an exit code.
"""
