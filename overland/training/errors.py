class TrainingError(Exception):
    """Training cannot go on; the message is a sentence for the user."""


class TakenError(TrainingError):
    """Somebody else trains in the run folder."""


class OutOfMemoryError(TrainingError):
    """There is no memory left; the message says what held it and what to change."""
