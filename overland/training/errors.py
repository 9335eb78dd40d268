class TrainingError(Exception):
    """Training cannot go on; the message is a sentence for the user."""
