"""The supervisor of a job: starts the ranks, monitors them, and restarts them after a fault."""
