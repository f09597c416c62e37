"""At which addresses a run listens, on a machine whose own name leads to the network."""

import os
import shlex
import socket
import subprocess
from pathlib import Path

LISTENS = "0A"
"""Of a TCP socket in /proc/net/tcp (include/net/tcp_states.h)."""

HERE = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 there."""


def descendants(pid: int) -> list[int]:
    found = [pid]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += [int(each) for each in task.read_text().split()]
            except OSError:
                continue
    return found


def open_to_others(pid: int) -> set[str]:
    """Addresses other than loopback at which a process and its descendants listen."""
    inodes: set[str] = set()
    rows = []
    for process in descendants(pid):
        try:
            links = [os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir()]
            for kind in ("tcp", "tcp6"):
                rows += Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]
        except OSError:  # it has just ended
            continue
        inodes |= {each[len("socket:[") : -1] for each in links if each.startswith("socket:[")}
    fields = [row.split() for row in rows]
    mine = [each for each in fields if each[3] == LISTENS and each[9] in inodes]
    return {each[1] for each in mine if each[1].partition(":")[0] not in HERE}


def own_address() -> str:
    """Of this machine on the network; one that leads nowhere if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "192.0.2.2"
        return str(asked.getsockname()[0])


def on_a_machine_called(name: str, hosts: Path, command: list[str]) -> list[str]:
    """A command whose host name resolves to the network; as it is where that takes rights."""
    hosts.write_text(f"127.0.0.1 localhost\n{own_address()} {name}\n")
    enter = f"hostname {name} && mount --bind {shlex.quote(str(hosts))} /etc/hosts"
    inside = ["unshare", "--uts", "--mount", "sh", "-c"]
    try:
        subprocess.run([*inside, enter], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return command
    return [*inside, f"{enter} && exec {shlex.join(command)}"]
