class DataError(Exception):
    """Data that cannot be read or does not fit; the message is a sentence for the user."""


def bad_ones(count: int) -> str:
    """Documents that were skipped, in words."""
    return f"{count:,} bad {'one' if count == 1 else 'ones'}"


class Unsettled(DataError):
    """Something that only the user can choose, such as a column. By which option depends on who
    asks: a flag of a command, or a key of a config."""

    def __init__(self, before: str, option: str, after: str) -> None:
        super().__init__(f"{before}--{option}{after}")
        self.before, self.option, self.after = before, option, after

    def by(self, option: str) -> DataError:
        """The same, where the option has this name."""
        return DataError(f"{self.before}{option}{self.after}")
