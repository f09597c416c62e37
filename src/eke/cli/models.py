"""`eke export|generate|evaluate RUN`: export, use or evaluate the model of a finished run."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from eke.cli import make_parser, whole_number
from eke.common.files import json_safe
from eke.common.paths import user_path
from eke.config.compose import split_arguments
from eke.plan.record import EXIT_OK
from eke.workflows import print_once, warn_and_set_loggers
from eke.workflows.evaluate import evaluate_run, render
from eke.workflows.export import export
from eke.workflows.generate import Sampling, TextWriter

_EXPORT = """\
Writes the model of a finished run for other libraries: safetensors, config.json, tokenizer with
chat template, generation config and a model card, without optimizer state. A run with adapters
gives an adapter for PEFT, or with --merge a model for plain transformers.
"""

_GENERATE = """\
Generates text after a prompt with a trained model. With a chat template, each PROMPT is a message
of the user, and the answer is printed. Without PROMPT, the standard input is the prompt. On a
terminal, each line is a prompt of a conversation (/reset starts a new one, Ctrl-D ends).
"""

_EVALUATE = """\
Evaluates the model of a finished run: loss, and accuracy, F1 and each class, or perplexity and
token accuracy. Without overrides it uses the evaluation samples of the run. Other data
(data.path=test.csv, or another option of data) is evaluated to its last row. Overrides of
precision, attention, hardware, dataloader and batch.eval_per_device are also possible.

evaluate.generate=true also generates answers with the most probable tokens, of at most
evaluate.max_new_tokens=128, and reports exact match and ROUGE-L by words.
"""


def main(command: str, arguments: Sequence[str]) -> int:
    """Parse and run a command. Return the exit code."""
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "export": _export, "generate": _generate, "evaluate": _evaluate,
    }  # fmt: skip
    return commands[command](arguments)


def _export(arguments: Sequence[str]) -> int:
    parser = make_parser("export", _EXPORT)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its id in runs/")
    parser.add_argument("folder", metavar="DIR", help="a new or empty folder")
    parser.add_argument("--merge", action="store_true", help="merge adapters into the weights")
    about = "send DIR to this repository of the Hub (created as private)"
    parser.add_argument("--push", metavar="NAME", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    text = export(options.run, options.folder, options.merge, options.push)
    if not options.json:
        return print_once(text)
    folder = user_path(options.folder)
    files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    notes = [line.strip() for line in text.splitlines()[1:]]
    content = {"run": options.run, "folder": str(folder), "files": files, "notes": notes}
    return print_once(json.dumps(content, indent=1))


def _evaluate(arguments: Sequence[str]) -> int:
    parser = make_parser("evaluate", _EVALUATE)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its id in runs/")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="data.path=test.csv")
    about = "run the model's code, if another user wrote it"
    parser.add_argument("--trust", action="store_true", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    typed = split_arguments(options.overrides)
    warn_and_set_loggers(typed)
    found = evaluate_run(options.run, typed.overrides, options.trust)
    content = json.dumps(json_safe(asdict(found)), indent=1, allow_nan=False)
    return print_once(content if options.json else render(found))


def _generate(arguments: Sequence[str]) -> int:
    options = _sampling_options(arguments)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    with contextlib.closing(TextWriter(options.run, sampling, options.raw)) as writer:
        if not options.prompts and sys.stdin.isatty() and not options.json:
            return _converse(writer)
        code = EXIT_OK
        for prompt in options.prompts or [sys.stdin.read()]:
            writer.forget()
            answer = writer.answer(prompt)
            text = json.dumps({"prompt": prompt, "answer": answer}) if options.json else answer
            code = max(code, print_once(text))
        return code


def _sampling_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("generate", _GENERATE)
    parser.add_argument("run", metavar="RUN", help="a run's folder or id, or an exported folder")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    how = Sampling()
    parser.add_argument(
        "--max-new-tokens", type=whole_number(1), default=how.max_new_tokens, metavar="N",
        help=f"maximum number of new tokens (default: {how.max_new_tokens})",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=how.temperature, metavar="T",
        help="sampling temperature. 0 takes the most probable token (default)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=float, default=how.top_p, metavar="P",
        help="sample from the most probable tokens with sum P (default: all)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=how.seed, metavar="S", help="sampling seed")
    about = "print one JSON object per line for each PROMPT"
    parser.add_argument("--json", action="store_true", help=about)
    parser.add_argument("--raw", action="store_true", help="do not use the chat template")
    options = parser.parse_args(arguments)
    if options.temperature < 0 or not 0 < options.top_p <= 1:
        parser.error("--temperature must be at least 0, --top-p above 0 and at most 1")
    if options.top_p < 1 and options.temperature == 0:
        parser.error("--top-p has no effect without --temperature")
    return options


def _converse(writer: TextWriter) -> int:
    """Read lines and print answers until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # enables line editing
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
