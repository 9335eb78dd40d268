"""Compiles the training kernels for AMD's GPUs, without one, and writes what they take there.

python -m tests.prove_amd docs/evidence/amd_kernels.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import triton

from tests.kernels.test_triton import AMD, KERNELS, compile_for_amd, number_in

HEAD = """\
# Our kernels on AMD's GPUs

Compiled by Triton {version} without a GPU: registers of each thread, and how many of them spill \
to memory, in wavefronts of 64 threads. None of these kernels has run on such a GPU yet; there, a \
run compares each with PyTorch's result before it uses it (`training.kernels`). By \
`python -m tests.prove_amd` (part of `make prove-all`).

| kernel | GPU | vector registers | spilled | scalar registers | spilled | bytes |
|---|---|---|---|---|---|---|
"""
COUNTS = ("vgpr_count", "vgpr_spill_count", "sgpr_count", "sgpr_spill_count")


def main(path: Path) -> None:
    rows = []
    for name in KERNELS:
        for gpu in AMD if name != "float8" else ():
            compiled = compile_for_amd(name, gpu)
            counts = [number_in(compiled.asm["amdgcn"], count) for count in COUNTS]
            cells = [name, gpu, *counts, len(compiled.asm["hsaco"])]
            rows.append("| " + " | ".join(map(str, cells)) + " |\n")
    path.write_text(HEAD.format(version=triton.__version__) + "".join(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
