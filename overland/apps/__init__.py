"""Everything around the trainer: converting, evaluating, generating, reporting, proving, and
reading the configs and checkpoints of other trainers.

Each is a package of its own that one verb of the command calls. The core imports none of them; the
few that a run may need it finds by name (`overland/plugins.py`).
"""
