"""One validated config per run, from a file, the environment and the command line.

`schema` has every key with its meaning and default; `load.py` is the way in and tells the whole
way. `source.py` reads TOML and YAML with the place of each value, `arguments.py` the command line,
`validate.py` makes one sentence of each mistake, and `write.py` writes a config back.
"""
