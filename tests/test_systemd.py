"""What the service manager hears, and which sockets are taken from it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from receiver.systemd import Notifier, start_watchdog, take_sockets

ROOT = Path(__file__).parents[1]
PATIENCE_S = 10.0


class Manager:
    """The receiving end of a notification socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.bind(address.replace("@", "\0", 1))

    @property
    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address}

    def heard(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = str(tmp_path / "notify")
    made = Manager(path if request.param == "path" else f"@receiver-test-{os.getpid()}")
    yield made
    made.socket.close()


def test_each_state_is_sent_as_the_manager_expects_it(manager: Manager) -> None:
    notifier = Notifier(manager.environment)

    notifier.ready("receiving for\n2  sources")
    notifier.reloading(5_000_001)
    notifier.stopping()
    notifier.watchdog()

    assert [manager.heard() for _ in range(4)] == [
        ["READY=1", "STATUS=receiving for 2 sources"],
        ["RELOADING=1", "MONOTONIC_USEC=5000"],
        ["STOPPING=1", "STATUS=stopping"],
        ["WATCHDOG=1"],
    ]


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/gone"}])
def test_without_a_manager_nothing_happens(environment: dict[str, str]) -> None:
    Notifier(environment).ready("fine")


def test_a_manager_that_does_not_listen_fast_enough_holds_up_nothing(manager: Manager) -> None:
    notifier = Notifier(manager.environment)

    for _ in range(5_000):
        notifier.watchdog()

    assert manager.heard() == ["WATCHDOG=1"]


@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_the_watchdog_is_fed_by_the_event_loop_twice_a_period(manager: Manager) -> None:
    period_s = 0.1
    environment = manager.environment | {"WATCHDOG_USEC": str(int(period_s * 1e6))}

    async def live() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        start_watchdog(loop, Notifier(environment), environment, os.getpid())
        for _ in range(4):
            assert await asyncio.to_thread(manager.heard) == ["WATCHDOG=1"]
        return loop.time() - started

    took_s = asyncio.run(live())

    assert took_s >= 3 * period_s / 2
    manager.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.heard()


@pytest.mark.parametrize("manager", ["path"], indirect=True)
@pytest.mark.parametrize(
    "period",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"},
    ],
)
def test_a_watchdog_that_is_off_or_not_for_us_is_left_alone(
    manager: Manager, period: dict[str, str]
) -> None:
    environment = manager.environment | period

    async def live() -> None:
        start_watchdog(asyncio.get_running_loop(), Notifier(environment), environment, os.getpid())

    asyncio.run(live())

    manager.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.heard()


# Run in a process of its own, since the descriptors start at 3. `for_pid` is formatted in.
TAKE = """
import json, os, sys
sys.path.insert(0, {root!r})
for index, passed in enumerate(json.loads(sys.argv[1])):
    os.dup2(passed, 3 + index)
environment = json.loads(sys.argv[2])
environment["LISTEN_PID"] = str({for_pid})
from receiver.systemd import take_sockets
taken = take_sockets(environment, os.getpid(), os.getppid())
print(json.dumps([
    {{name: [[each.family.name, each.getsockname(), each.get_inheritable()] for each in sockets]
      for name, sockets in taken.items()}},
    environment,
]))
"""


def taken(
    sockets: list[socket.socket], environment: dict[str, str], for_pid: str = "os.getpid()"
) -> list[Any]:
    # High numbers, so that moving them to 3 and on overwrites none.
    descriptors = [os.dup(each.fileno()) for each in sockets]
    high = [os.dup2(each, 50 + index) for index, each in enumerate(descriptors)]
    program = TAKE.format(root=str(ROOT), for_pid=for_pid)
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(high), json.dumps(environment)],
        pass_fds=high,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 3,
        check=True,
    )
    for each in (*descriptors, *high):
        os.close(each)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def unix(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "http.sock"))
        made.listen()
        yield made


@pytest.mark.parametrize("for_pid", ["os.getpid()", "os.getppid()"])
def test_passed_sockets_are_taken_by_name_whatever_their_family(
    tcp: socket.socket, unix: socket.socket, for_pid: str
) -> None:
    environment = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:admin", "HOME": "/"}

    found, left = taken([unix, tcp], environment, for_pid)

    assert found == {
        "http": [["AF_UNIX", unix.getsockname(), False]],
        "admin": [["AF_INET", list(tcp.getsockname()), False]],
    }
    assert left == {"HOME": "/"}


def test_two_sockets_of_one_name_and_nameless_ones_are_all_taken(tcp: socket.socket) -> None:
    assert len(taken([tcp, tcp], {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:a"})[0]["a"]) == 2
    assert len(taken([tcp, tcp], {"LISTEN_FDS": "2"})[0][""]) == 2


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1", "LISTEN_PID": "1"},
        {"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())},
    ],
)
def test_sockets_that_are_not_ours_are_left_alone(environment: dict[str, str]) -> None:
    assert take_sockets(environment, os.getpid(), -1) == {}
