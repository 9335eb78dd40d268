class CheckpointError(Exception):
    """A checkpoint that is missing or cannot be used; the message is a sentence for the user."""


class NotSavedError(CheckpointError):
    """The last save of a session failed: what was learned since the one before is lost."""


def sentence(error: Exception) -> str:
    """What went wrong, in a line."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__
