"""Objectives: what a step minimises. One file each; your own by `register_objective`."""

from overland.training.objectives.registry import give_objective, objective_for, register_objective

__all__ = ["give_objective", "objective_for", "register_objective"]
