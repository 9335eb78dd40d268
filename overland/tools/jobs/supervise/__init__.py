"""The supervisor of a job: starts the ranks, watches them, starts them again after a fault."""
