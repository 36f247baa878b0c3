"""What is done outside the request, for the operator to read: the worker, and where it sends."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from receiver.config import Settings
from receiver.destinations import Command, Destination, Email, Http
from receiver.select import Scope, Template

_PLACES = {
    "inside": "inside the server",
    "separate": "apart, as `receiver work`",
    "off": "off: nothing is sent, and nothing is tried again",
}


def worker_of(settings: Settings) -> str:
    """Where the worker runs."""
    return _PLACES[settings.worker.run]


def listed(settings: Settings) -> Iterator[str]:
    """What a worker has to do by this config, a line for each duty."""
    for source in settings.sources.values():
        if source.mode == "queued":
            yield f"queued source {source.name}"
        if source.api is not None:
            yield f"source {source.name}: reads {_host_of(source.api.base_url)}"
    for destination in settings.destinations.values():
        yield f"destination {destination.name}: {place_of(destination)}"


def place_of(destination: Destination) -> str:
    """Kind and place; of a URL only the host, since its path or its query may be a secret."""
    match destination:
        case Http(url=url):
            return f"http to {_host_of(url)}"
        case Email(smtp=smtp, to=to):
            return f"email to {_recipient(to)} through {_host_of(smtp)}"
        case Command(argv=argv):
            return f"command {_literal(argv[0])}"


def _recipient(to: Template) -> str:
    return ", ".join(path.text for path in to.paths) or _literal(to)


def _host_of(url: str) -> str:
    if not url:
        return "an address kept as a secret"
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _literal(template: Template) -> str:
    return str(template.render(Scope(None, {})))
