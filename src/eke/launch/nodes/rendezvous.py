"""How the machines of a run find each other: a file in a folder that all of them see.

The first one listens and writes down where; the others connect and name the secret of that file,
which only its owner can read. Messages are lines of JSON; a lost connection is a lost machine.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eke.common.files import read_json, write_atomic

ANY_ADDRESS = "0.0.0.0"  # compared with, where `listen` found no other
"""Of a socket that listens at all addresses."""

MAX_LINE = 65536
"""Bytes; whoever sends more is none of ours."""


@dataclass(frozen=True)
class Invitation:
    """Where the first machine listens."""

    step: str
    """Of whom it waits for."""
    host: str
    port: int
    secret: str


def write_invitation(file: Path, invitation: Invitation) -> None:
    """Write it whole, for the user's own eyes.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomic(file, json.dumps(asdict(invitation)), mode=0o600)


def read_invitation(file: Path, step: str) -> Invitation | None:
    """The invitation to this step; None while there is none."""
    try:
        os.listdir(file.parent)  # makes a network file system look again
        found = Invitation(**read_json(file))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.step == step else None


def host_name() -> str:
    """This machine as the others know it; MASTER_ADDR, as for torchrun, where they do not."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def listen(backlog: int) -> socket.socket:
    """Listen at the address of `host_name`; at all where that is not to be reached from outside.

    Raises:
        OSError: there is no port.
    """
    with contextlib.suppress(OSError):  # it may be an address of the network's and not its own
        address = socket.gethostbyname(host_name())
        if "MASTER_ADDR" in os.environ or not address.startswith("127."):
            return socket.create_server((address, 0), backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


class Line:
    """A connection on which both sides send lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection
        self._lines = connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message; False when nobody is there any more."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message; None when there will be no more."""
        try:
            found = json.loads(self._lines.readline(MAX_LINE) or b"null")
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Leave; the other side, and a thread of ours that waits for it, sees so."""
        self.end()
        self._lines.close()
        self._connection.close()

    def end(self) -> None:
        """Send and receive nothing any more."""
        with contextlib.suppress(OSError):  # the other side has left already
            self._connection.shutdown(socket.SHUT_RDWR)
