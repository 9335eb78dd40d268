"""Batches of packed sequences from MDS shards, for a training script of one's own. Ranks share one
cache: each document is tokenised once, and every row is given to one rank."""

from overland.data import build_train_loader

__all__ = ["build_train_loader"]
