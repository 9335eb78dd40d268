class DataError(Exception):
    """Data that cannot be read or does not fit; the message is a sentence for the user."""
