"""`eke data show`: print the first rows of the training data and the row lengths."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from itertools import groupby
from typing import Any

from eke.cli import make_parser
from eke.common.errors import ConfigError, Fix, Problem
from eke.common.output import printable
from eke.common.screen import has_color, width, wrap, wrap_log
from eke.common.text import format_number
from eke.config.compose import compose, is_set, needs_sweep, split_arguments
from eke.config.mixing import source_configs
from eke.config.schema import Config, Mix, Rows
from eke.data.sources import Store, open_store, request_of
from eke.hardware import detect
from eke.models.checkpoints import follow_head, resolve_model, resolve_tokenizer
from eke.plan.planner.samples import plan_data
from eke.rules import RuleInputs, check
from eke.workflows import print_once, warn_and_set_loggers

_DESCRIPTION = """Shows the first rows as text, with trained tokens in green, or between [[ and ]]
without colours. Then shows row lengths and the numbers of bad, empty and truncated rows."""

_Join = Callable[[list[int]], str]


def main(command: str, arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser(command, _DESCRIPTION)
    usage = "eke data show [--rows N] [--ids] [--json] [--config-dir FOLDER] [overrides]"
    parser.usage = "\n".join(wrap(usage, width() - len("usage: "), other=" " * 7))
    parser.add_argument("show", choices=["show"], help="the only command")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="rows (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ids", action="store_true", help="also show the token ids")
    options, typed = parser.parse_known_args(arguments)
    config = _configuration(typed)
    if options.json:
        parts = source_configs(config) if isinstance(config.data, Mix) else [config]
        return print_once(json.dumps([_as_json(part, options.rows) for part in parts], indent=2))
    if not isinstance(config.data, Mix):
        return print_once(_shown(config, options))
    texts = []
    for source, part in zip(plan_data(config, []).sources, source_configs(config), strict=True):
        rows = _shown(part, options) if isinstance(part.data, Rows) else "text without rows"
        texts.append(f"source {source.name}: {source.share:.1%} of the samples\n\n{rows}")
    return print_once("\n\n\n".join(texts))


def _shown(config: Config, options: Namespace) -> str:
    request = request_of(config)
    if request is None or request.corpus:
        what = f"text is cut into samples of {config.data.seq_len} tokens, all of them trained"
        what = "tokens are drawn at random" if config.data.option == "synthetic" else what
        return "\n".join(wrap(f"data={config.data.option} has no rows: {what}", width()))
    store = open_store(request)
    from eke.data.preparation.tokenizers import load_request_tokenizer  # imports transformers

    join = load_request_tokenizer(request).join
    count = min(options.rows, store.manifest.counts["cuts"])
    rows = [_row(config, store, join, number, options.ids) for number in range(count)]
    if sys.stdout.isatty():
        rows = ["\n".join(wrap_log(row.split("\n"), width())) for row in rows]
    return "\n\n".join([*rows, _summary(config, store)])


def _as_json(config: Config, most: int) -> dict[str, Any]:
    """Return the first rows and the counts of one source as JSON values."""
    request, rows = request_of(config), list[dict[str, Any]]()
    if request is None or request.corpus:
        return {"data": config.data.option, "counts": {}, "rows": rows}
    store = open_store(request)
    from eke.data.preparation.tokenizers import load_request_tokenizer  # imports transformers

    join, found = load_request_tokenizer(request).join, store.manifest
    for number in range(min(most, found.counts["cuts"])):
        ids, trained = _tokens(config, store, number)
        label = _label(store, number).removeprefix(", ")
        rows.append({"ids": ids, "trained": trained, "text": join(ids), "label": label})
    names = ("num_rows", "num_bad", "num_empty", "num_truncated")
    counts = {name: getattr(found, name) for name in names}
    return {"data": config.data.option, "counts": counts, "rows": rows}


def _configuration(typed: list[str]) -> Config:
    """Return the configuration with its checkpoint's tokenizer. Check only rules about data."""
    arguments = split_arguments(typed, {"--rows": 1, "--ids": 0, "--json": 0})
    if arguments.multirun or arguments.hydra_flags or needs_sweep(arguments.overrides):
        fix, why = Fix(remark="eke data show with the overrides of one run"), "shows a single run"
        raise ConfigError(Problem("eke data show", "", why, fix, "wrong_argument"))
    warn_and_set_loggers(arguments)
    composed = compose(arguments.overrides, arguments.config_dir)
    config = resolve_model(composed.config, composed.overrides, planning=True)
    if not is_set(composed, "task.num_labels"):
        config = follow_head(config)
    config = resolve_tokenizer(config)
    refused, _ = check(RuleInputs(config, detect(), planning=True))
    if about_data := [p for p in refused if p.key.partition(".")[0] in ("data", "task")]:
        raise ConfigError(about_data)
    return config


def _tokens(config: Config, store: Store, number: int) -> tuple[list[int], list[bool]]:
    """Return the token ids of a row, and whether each is trained."""
    start, end = map(int, store.array("offsets")[number : number + 2])
    ids = store.array("tokens")[start:end].tolist()
    cut = int(store.array("cuts")[number]) if config.targets.is_generated else len(ids)
    trained = [place >= cut for place in range(len(ids))]
    if store.has("trained"):
        trained = store.array("trained")[start:end].astype(bool).tolist()
    trained[0] &= not config.targets.is_causal  # the first token is not predicted
    return ids, list(map(bool, trained))


def _row(config: Config, store: Store, join: _Join, number: int, with_ids: bool) -> str:
    ids, trained = _tokens(config, store, number)
    use = "evaluation" if number in store.array("evaluation") else "training"
    heading = f"row {number + 1} ({use}): {format_number(len(ids), 'token')}"
    heading += f", {sum(trained)} trained" if config.targets.is_generated else ""
    heading += _label(store, number)
    ways: list[_Join] = [join, lambda part: " ".join(map(str, part))]
    return "\n".join([heading, *(_mark_trained(way, ids, trained) for way in ways[: 1 + with_ids])])


def _label(store: Store, number: int) -> str:
    """Return the classes or the number of a row as text, "" without a label."""
    names, start, end = store.manifest.label_names, number, number + 1
    if store.has("label_offsets"):
        start, end = store.array("label_offsets")[number : number + 2]
    for array, what in (("labels", "class"), ("values", "label")):
        if store.has(array):
            found = [names[n] if names else f"{n:g}" for n in sorted(store.array(array)[start:end])]
            return f", {what} {', '.join(found) or 'none'}"
    return ""


def _mark_trained(join: _Join, ids: list[int], trained: list[bool]) -> str:
    """Mark the trained parts of a row. Each part begins after the text of the parts before."""
    before, after = ("\x1b[1;32m", "\x1b[0m") if has_color() else ("[[", "]]")
    whole, marked, at, end = join(ids), "", 0, 0
    for is_trained, tokens in groupby(trained):
        end += len(list(tokens))
        stop = len(join(ids[:end]))
        part = printable(whole[at:stop], colours=False)
        marked += f"{before}{part}{after}" if is_trained else part
        at = stop
    return marked


def _summary(config: Config, store: Store) -> str:
    import numpy as np

    found, total = store.manifest, store.manifest.counts["tokens"]
    lengths = np.diff(store.array("offsets"))
    low, high = int(lengths.min()), int(lengths.max())
    step = -(-(high - low + 1) // 8)  # 8 lines
    lines = [f"tokens of a row: {low} to {high}, median {np.median(lengths):g}"]
    sizes = np.bincount((lengths - low) // step).tolist()
    for first, size in zip(range(low, high + 1, step), sizes, strict=True):
        room, last = min(40, width() - 32), f"to {first + step - 1}" * (step > 1)
        bar = "#" * round(room * size / max(sizes))
        lines.append(f"  {first:>7} {last:<10} {size:>9}  {bar}".rstrip())
    if config.targets.is_generated:
        first = int(config.targets.is_causal)  # the first token is not predicted
        trained = found.num_trained or total - int(np.maximum(store.array("cuts"), first).sum())
        lines.append(f"trained: {trained / total:.1%} ({trained} of {total} tokens)")
    counts = f"{found.num_bad} bad, {found.num_empty} empty, {found.num_truncated} truncated"
    lines.append(f"rows: {found.num_rows} read; {counts}")
    lines += [f"ignored: {printable(', '.join(found.ignored))}"] if found.ignored else []
    lines += [f"first bad row: {printable(row)}" for row in found.bad_rows[:1]]
    if found.num_bad > getattr(config.data, "max_bad_frac", 1) * found.num_rows:
        lines.append("A run rejects data with so many bad rows. Details: eke plan")
    return "\n".join(wrap_log(lines, width()))
