"""What can go wrong in the store, in words that need no knowledge of SQLite."""


class StoreError(Exception):
    """The file can't be used as it is; the message says what to do."""


class NewerFile(StoreError):
    """A later version of Receiver wrote the file."""


class Unavailable(Exception):
    """Nothing can be acknowledged now: the disk is full or failing, the file locked too long,
    or too much is waiting. What was asked for may be tried again."""


class Replaced(Exception):
    """The file on disk is not the one that is written: what is committed would be lost."""


class TransactionLost(Exception):
    """A statement ended the whole transaction; everything in it is undone."""


class Refused(Exception):
    """A rule that the file itself keeps does not allow this; the message says which."""


class Failed(Exception):
    """A founder's statement was refused or failed; the message is SQLite's, bounded."""
