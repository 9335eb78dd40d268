"""Runs on a cluster: jobs, the supervisor that keeps a chain of them going, and tests of nodes.

`submit.py` writes and submits the scripts of a chain (`script.py`, `job.py`) for a site (`site.py`,
`sites/*.toml`). In the job, `supervise` starts the ranks, listens to them through the agent of each
node (`agent.py`, `wire.py`) and restarts them after a fault; `preflight` tests nodes and links, and
`doctor` everything around a run.
"""
