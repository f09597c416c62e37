#!/usr/bin/env python3
"""Count the tests that assert wording: a text of four words or more in an assertion."""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from word_sources import is_prose, literal_texts

TESTS = Path(__file__).resolve().parents[1] / "tests"


def asserted_texts(test: ast.AST) -> Iterator[str]:
    """Yield the text literals in the assertions of a test, `pytest.raises(match=...)` included."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            yield from (text for _, text in literal_texts(node.test))
        elif isinstance(node, ast.keyword) and node.arg == "match":
            yield from (text for _, text in literal_texts(node.value))


def find_tests(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and name of each test of a file, and whether it asserts wording."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and node.name.startswith("test_"):
            yield node.lineno, node.name, any(map(is_prose, asserted_texts(node)))


def main() -> int:
    """Print the share of tests that assert wording."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--list", nargs="?", const="", metavar="TEXT", help="list them, of paths that contain TEXT"
    )
    parser.add_argument(
        "--fail-over", type=float, metavar="PERCENT", help="exit 1 if the share is larger"
    )
    args = parser.parse_args()
    counts: dict[str, list[int]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS.parent).as_posix()
        for line, test, is_wording in find_tests(path):
            part = counts.setdefault("/".join(name.split("/")[1:3]), [0, 0])
            part[0] += 1
            part[1] += is_wording
            if is_wording and args.list is not None and args.list in name:
                print(f"{name}:{line}: {test}")
    tests, wording = (sum(column) for column in zip(*counts.values(), strict=True))
    share = 100 * wording / tests
    if args.list is None:
        for part, (total, found) in counts.items():
            if not part.endswith(".py"):
                print(f"{part:28}{found:6} of {total}")
        print(f"{'all tests':28}{wording:6} of {tests}: {share:.1f} %")
    if args.fail_over is not None and share > args.fail_over:
        print(f"{share:.1f} % of the tests assert wording. The limit is {args.fail_over:g} %.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
