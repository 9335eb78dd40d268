"""What stands around the trainer. Only the command line calls it; the core knows nothing of it."""
