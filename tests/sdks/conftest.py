from collections.abc import Iterator

import pytest

from tests.sdks.node import Node


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    running = Node()
    yield running
    running.close()
