class ClusterError(Exception):
    """Ranks could not be started or could not go on; the message is a sentence for the user."""
