"""Objectives: what a training step minimizes. Add your own with `register_objective`.

Importing this package does not import torch.
"""

from overland.objectives.registry import give_objective, objective_for, register_objective

__all__ = ["give_objective", "objective_for", "register_objective"]
