class CheckpointError(Exception):
    """A checkpoint that is missing or cannot be used; the message is a sentence for the user."""


def sentence(error: Exception) -> str:
    """What went wrong, in a line."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__
