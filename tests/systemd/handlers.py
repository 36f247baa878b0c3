"""What a handler can do from inside the unit: each try is told with what came of it."""

import os
import shutil
import socket
import subprocess


def probe(event, tx):
    tx.record("probe", {name: _told(act) for name, act in TRIES.items()}, operation="probe-told")


def _told(act):
    try:
        act()
    except Exception as error:
        return f"refused: {type(error).__name__} {error}"[:200]
    return "allowed"


def _connect(address):
    socket.create_connection(address, timeout=2).close()


def _write(path):
    with open(path, "w") as file:
        file.write("x")
    os.unlink(path)


def _read(path):
    with open(path, "rb") as file:
        file.read(1)


def _run_own(folder):
    path = folder + "/own"
    shutil.copyfile("/bin/true", path)
    os.chmod(path, 0o700)
    try:
        subprocess.run([path], check=True)
    finally:
        os.unlink(path)


TRIES = {
    "network": lambda: _connect(("192.0.2.1", 80)),
    "network-here": lambda: _connect(("127.0.0.1", 8081)),
    "socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "exec-sh": lambda: subprocess.run(["/bin/sh", "-c", ":"], check=True),
    "exec-true": lambda: subprocess.run(["/bin/true"], check=True),
    "exec-curl": lambda: subprocess.run(["/usr/bin/curl", "-V"], check=True),
    "exec-own": lambda: _run_own(os.environ["STATE_DIRECTORY"]),
    "exec-runtime": lambda: _run_own(os.environ["RUNTIME_DIRECTORY"]),
    "exec-var-tmp": lambda: _run_own("/var/tmp"),
    "exec-tmp": lambda: _run_own("/tmp"),
    "write-etc": lambda: _write("/etc/receiver/x"),
    "write-usr": lambda: _write("/usr/local/x"),
    "write-var": lambda: _write("/var/x"),
    "write-srv": lambda: _write("/srv/x"),
    "write-state": lambda: _write(os.environ["STATE_DIRECTORY"] + "/x"),
    "read-shadow": lambda: _read("/etc/shadow"),
    "read-root": lambda: os.listdir("/root"),
    "read-credentials": lambda: os.listdir("/etc/receiver/credentials"),
    "read-others": lambda: _read("/run/credentials/other.service/secret"),
    "read-environ": lambda: _read("/proc/1/environ"),
    "read-own": lambda: _read(os.environ["CREDENTIALS_DIRECTORY"] + "/receiver_stripe"),
}
