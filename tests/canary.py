"""What no log, metric, response or error may hold, whatever test made it."""

#: Parts of the secrets that the tests sign with, and a field of the bodies that they send.
SECRETS = ("whsec_of_", "of the hook", "shpss_of_")
PAYLOAD = "canary-of-the-payload"


def found_in(text: str, *, secrets_only: bool = False) -> list[str]:
    """The canaries in a text."""
    wanted = SECRETS if secrets_only else (*SECRETS, PAYLOAD)
    return [one for one in wanted if one in text]
