"""`eke generate RUN [PROMPT ...]`: parse the command line, ask and print."""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from eke.plan.record import EXIT_OK
from eke.workflows import print_once
from eke.workflows.generate import Sampling, Writer

DESCRIPTION = """\
Writes what a trained model continues a prompt with. With a chat template each PROMPT is a message
of the user, and the answer is printed. Without PROMPT the standard input is the prompt; on a
terminal, lines are asked for, and the conversation goes on (/reset begins a new one, Ctrl-D ends).
"""


def main(arguments: Sequence[str]) -> int:
    """Parse, generate and print; return the exit code."""
    options = _parse(arguments)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    with contextlib.closing(Writer(options.run, sampling, options.raw)) as writer:
        if not options.prompts and sys.stdin.isatty():
            return _converse(writer)
        code = EXIT_OK
        for prompt in options.prompts or [sys.stdin.read()]:
            writer.forget()
            code = max(code, print_once(writer.answer(prompt)))
        return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "eke generate", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="a run's folder or id, or an exported folder")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    how = Sampling()
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=how.max_new_tokens, metavar="N",
        help=f"tokens at most (default: {how.max_new_tokens})",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=how.temperature, metavar="T",
        help="draw tokens; 0 takes the most probable one (default)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=float, default=how.top_p, metavar="P",
        help="draw from the most probable tokens that sum to P (default: all)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=how.seed, metavar="S", help="of drawn tokens")
    parser.add_argument("--raw", action="store_true", help="without the chat template")
    options = parser.parse_args(arguments)
    if options.temperature < 0 or not 0 < options.top_p <= 1:
        parser.error("--temperature is 0 or more, and --top-p more than 0 and at most 1")
    if options.top_p < 1 and options.temperature == 0:
        parser.error("--top-p has no effect without --temperature")
    return options


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _converse(writer: Writer) -> int:
    """Ask for lines and answer them, until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited
    while True:
        try:
            line = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return EXIT_OK
        if line.strip() == "/reset":
            writer.forget()
        elif line.strip():
            print_once(writer.answer(line))
