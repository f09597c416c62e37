"""Random damage to JSON, text and bytes, as a broken or hostile program leaves it."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from eke.data.preparation.untrusted import limited_memory

SEED = int(os.environ.get("EKE_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("EKE_FUZZ", "0"))
"""Cases of each kind; 0: the few of `make test`."""

CASE_S = 60.0
"""Processor time of one case, s."""

DEEP = "[" * 5000 + "]" * 5000
NESTED: Any = json.loads("[" * 300 + "]" * 300)
DEEP_KEYS: Any = json.loads('{"a":' * 90 + "1" + "}" * 90)

VALUES: list[Any] = [
    None, True, -1, 0, 2**63, 10**400, -(10**30), 1e308, -1e308, 1e-320, 2**62,
    float("inf"), float("nan"), "", " ",
    "x" * 99_999, "\ud800", "\x1b]52;c;YQ==\x07", "\u202e", "\x00", "nan", "inf", "../..",
    "<script>", "=1+1", "a\nb",
    [], [1], {}, {"": None}, {"a": {"b": [1]}}, NESTED, DEEP_KEYS, [[]], ["a", 1, None],
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutated_tree(rng: Random, tree: Any) -> Any:
    """A copy with one to three values replaced, removed or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 3)):
        *path, key = rng.choice(list(places(tree)) or [("a",)])
        holder = tree
        for step in path:
            holder = holder[step]
        kind = rng.random()
        if kind < 0.15 and isinstance(holder, dict):
            holder.pop(key)
        elif kind < 0.25 and isinstance(holder, dict):
            holder[rng.choice(["", "a.b", "\ud800", "x" * 300])] = rng.choice(VALUES)
        else:
            holder[key] = rng.choice(VALUES)
    return tree


def mutated_bytes(rng: Random, content: bytes) -> bytes:
    """The same, cut, emptied, or with other bytes."""
    place = rng.randrange(len(content) + 1)
    return rng.choice([
        b"", content[:place], content[place:], content + content, b"\xef\xbb\xbf" + content,
        b"\xff\xfe" + content,
        content[:place] + rng.randbytes(rng.randint(1, 40)) + content[place + 5 :],
        content[:place] + b"\x00" * 9 + content[place:], DEEP.encode(),
        b"[]", b"null", b"0", b'{"a": 1e999}',
        content.replace(b"\n", b"\r"), content.replace(b'"', b"'"),
        content.replace(b":", b": -Infinity, \"b\":", 1),
    ])  # fmt: skip


def damage(rng: Random, file: Path) -> str:
    """Change a file, or put something else in its place; returns what was done."""
    content, kind = file.read_bytes(), rng.random()
    if kind < 0.6 and file.suffix == ".json":
        file.write_text(json.dumps(mutated_tree(rng, json.loads(content))))
        return "a tree"
    if kind < 0.9:
        file.write_bytes(mutated_bytes(rng, content))
        return "bytes"
    file.unlink()
    ways: dict[str, Callable[[], Any]] = {
        "a folder": file.mkdir, "a pipe": lambda: os.mkfifo(file), "missing": lambda: None,
        "a loop": lambda: file.symlink_to(file),
        "a hole": lambda: os.truncate(os.open(file, 66), 1 << 33),
        "endless": lambda: file.symlink_to("/dev/zero"),
    }  # fmt: skip
    name = rng.choice(list(ways))
    ways[name]()
    return name


@contextmanager
def case(what: str) -> Iterator[None]:
    """One case: its seed is named, and time and memory are limited."""
    started = time.process_time()
    for stream in (sys.stdout, sys.stderr):  # as `open_streams` makes them
        stream.reconfigure(errors="backslashreplace")
    try:
        with limited_memory(2 << 30):
            yield
    except BaseException as error:
        error.add_note(f"EKE_FUZZ_SEED={SEED}: {what}")
        raise
    assert time.process_time() - started < CASE_S, what
