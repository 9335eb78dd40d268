"""Batches of packed sequences from MDS shards, for your own training script. Ranks share one cache:
each document is tokenized once, and every row goes to exactly one rank."""

from overland.data import build_train_loader

__all__ = ["build_train_loader"]
