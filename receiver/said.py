"""What an effect may say instead of taking place. A handler raises these too."""


class Park(Exception):
    """A needed fact is not there yet; the event is applied when it comes.

    Without a keyword the event waits until the operator attributes or replays it. `customer`:
    it waits for that customer's link. `subject` and `operation`: for that ledger entry.
    """

    def __init__(
        self,
        reason: str,
        *,
        customer: str | None = None,
        subject: str | None = None,
        operation: str | None = None,
    ) -> None:
        if (subject is None) != (operation is None):
            raise ValueError("an entry is named by its subject and its operation")
        for name in (customer, subject, operation):
            if name is not None and not (isinstance(name, str) and name.strip()):
                raise ValueError("what an event waits for is named by a text that is not empty")
        super().__init__(reason)
        self.customer = customer
        self.subject = subject
        self.operation = operation


class Quarantine(Exception):
    """The event is genuine but can't be applied as it stands; the operator decides."""
