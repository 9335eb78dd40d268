"""Objectives: what a step minimises. Your own by `register_objective`.

Importing this package costs no torch.
"""

from overland.objectives.registry import give_objective, objective_for, register_objective

__all__ = ["give_objective", "objective_for", "register_objective"]
