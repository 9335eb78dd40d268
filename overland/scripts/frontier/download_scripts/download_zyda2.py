"""Downloads the four parts of Zyda-2 (DCLM, FineWeb-Edu, Dolma, Zyda) to data/Zyda-2, with
`overland fetch dataset`, whose flags may follow: `--include` selects some of the many terabytes."""

import sys

from overland.cli.main import run

SUBSETS = (
    "dclm_crossdeduped",
    "fwe3",
    "dolma-cc_crossdeduped-filtered",
    "zyda_crossdeduped-filtered",
)

for subset in SUBSETS:
    words = ["--subset", subset, "--to", "data/Zyda-2"]
    run("fetch", "dataset", "Zyphra/Zyda-2", *words, *sys.argv[1:])
