"""Trains large language models on any machine, in sessions, without losing a token."""

__version__ = "0.1.0"
