class CheckpointError(Exception):
    """A checkpoint that is missing or cannot be used; the message is a sentence for the user."""
