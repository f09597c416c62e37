"""What a pool asks its fork server for, and how that crosses a socket; standard library only."""

import json
import os
import socket
from dataclasses import asdict, dataclass

LENGTH_BYTES = 8
"""In front of each request, with the descriptors: how long it is."""

MAX_DESCRIPTORS = 253
"""That one message can carry (SCM_MAX_FD, linux net/scm.h)."""

READY = "ready"
"""What the server says once it takes requests; anything else is why it never will."""

LONGEST_WORD = 4096
"""Bytes of that sentence."""

LET_GO = b"l"
"""What the server says once it has closed its own copies of a request's descriptors: locks among
them are held as long as anybody has them open."""

GO = b"g"
"""What the pool says to a forked process once it knows of its child; without it, it ends."""


@dataclass(frozen=True)
class Request:
    """A process, as `python -m MODULE ARGUMENTS` would start it."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    """All of it."""
    directory: str
    """Where it works."""
    cores: list[int]
    """Where it may run."""


def send_request(control: socket.socket, request: Request, descriptors: list[int]) -> None:
    """Ask for a process.

    Args:
        control: to the server.
        request: what it should do.
        descriptors: of this process, to be the other's as well.

    Raises:
        OSError: the server is gone, or takes nothing.
    """
    body = json.dumps(asdict(request)).encode()
    socket.send_fds(control, [len(body).to_bytes(LENGTH_BYTES)], descriptors)
    control.sendall(body)


def receive_request(control: socket.socket) -> tuple[Request, list[int]] | None:
    """The next request and its descriptors; None when nobody will ask any more."""
    head, descriptors, _, _ = socket.recv_fds(control, LENGTH_BYTES, MAX_DESCRIPTORS)
    body = b""
    length = int.from_bytes(head)
    while head and len(body) < length:
        part = control.recv(length - len(body))
        if not part:
            break
        body += part
    if not head or len(body) < length:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return Request(**json.loads(body)), descriptors
