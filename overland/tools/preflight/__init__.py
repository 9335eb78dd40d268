"""Tests every node, device and link of an allocation in seconds, and names the bad ones.

1. A *conductor*, on the batch host or in a shell, opens a switchboard and starts one *task* per
   device, just as training will be started (`start.py`); tasks call home (`crew.py`, `task.py`).
2. It orders one check after the other, and every task does it at the same time: clocks, versions,
   disks (`node.py`), devices (`device.py`). What may hang is done by a child of the task, which
   can be killed (`child.py`).
3. Nodes that are good so far are paired, log₂ N times, and measure the link between them
   (`tournament.py`, `link.py`); then all of them sum a tensor together (`all_reduce.py`).
4. What was measured is judged by pure functions (`judge.py`, `tournament.py`) and becomes a table
   and JSON (`report.py`).

No node waits for another but for its partner: who does not answer in time is bad, for that reason.
"""
