"""Tests every node, device and link of an allocation in seconds, and names the bad ones.

1. A *conductor*, on the batch host or in a shell, opens a switchboard and starts one *task* per
   device, just as training will be started (`start.py`); tasks connect back (`crew.py`, `task.py`).
2. It orders one check after another, and all tasks run it at the same time: clocks, versions, disks
   and devices (`measure.py`). Checks that may hang run in a child of the task, which can be
   killed.
3. Nodes that are good so far are paired, twice, and measure the link between them; then all of them
   sum a tensor together (`network.py`).
4. Pure functions judge the measurements (`judge.py`), which become a table and JSON (`report.py`).

A node waits only for its partner; a node that does not respond in time is bad for that reason.
"""
