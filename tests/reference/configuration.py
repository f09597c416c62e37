"""docs/reference/configuration/: one page per group, read from the schema and `conf/`."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_origin

import yaml

from eke.common.text import format_value
from eke.config.compose.catalogue import (
    GROUPS,
    Catalogue,
    Field,
    KeyRow,
    class_fields,
    default_text,
    key_rows,
    make_catalogue,
    option_summaries,
    title,
)
from eke.config.schema import ENTRIES
from eke.config.schema.fields import summary

_HEAD = "Generated from the schema and `conf/` by `make pages`.\n"
_MOST = 6
"""Values of an option that its row shows: a choice. `--help GROUP=OPTION` shows all."""
_ROOT = "run"
"""Page of the keys without a section."""

# Types in a terminal are phrases; the narrow cells of the pages have one word for each.
_WORDS = {
    "a whole number": "integer",
    "a number": "number",
    "true or false": "boolean",
    "a list [a,b]": "list",
}
_EXAMPLES = {
    "data.chat_template": "template.jinja", "data.config_name": "main",
    "data.eval_path": "eval.jsonl",
    "data.eval_split": "validation", "data.messages": "messages",
    "data.name": "OWNER/NAME", "data.path": "rows.jsonl", "data.pattern": "**/*.txt",
    "data.prompt": "question", "data.response": "answer", "data.revision": "v1.0",
    "data.separator": "\\n\\n", "data.text_pair": "hypothesis", "data.tokenizer": "gpt2",
    "data.sources": "[{option:jsonl,path:a.jsonl,weight:1}]",
    "distributed.deepspeed_config": "ds.json", "launcher.prefix": "[ssh node1,ssh node2]",
    "model.freeze": "[embed_tokens]", "model.name_or_path": "my_model", "model.revision": "main",
    "offload.path": "/scratch/nvme", "paths.runs": "/scratch/runs",
    "peft.target_modules": "[q_proj,v_proj]",
    "resources.account": "my_group", "resources.constraint": "a100", "resources.memory": "64G",
    "resources.partition": "gpu", "resources.qos": "long", "resources.time": "12:00:00",
    "slurm.account": "my_group", "slurm.constraint": "a100", "slurm.gpu_type": "a100",
    "slurm.partition": "gpu", "slurm.python": "/opt/venv/bin/python", "slurm.qos": "long",
    "slurm.command_prefix": "apptainer exec --nv eke.sif", "slurm.setup": "[module load cuda]",
    "slurm.srun": "['--cpu-bind=none']", "slurm.options": "{reservation:course}",
    "sweep.exclude": "['precision=fp16 and model=tiny_t5']", "sweep.repeats": "auto",
    "sweep.product": "{seed:[0,1]}", "sweep.rows": "{big:{model:gpt2}}",
    "sweep.zip": "{batch.per_device:[4,8],batch.accumulation:[2,1]}",
    "task.labels": "[no,yes]", "task.router_loss": "0.01", "tracker.entity": "my_team",
    "tracker.group": "first_tries", "tracker.uri": "http://localhost:5000",
    "train.keep_best": "accuracy", "train.resume": "runs/9dfebed7d5fce6b0",
    "model.head_dim": "32", "model.max_position_embeddings": "4096",
}  # fmt: skip
"""Key -> a value. The schema knows none: texts and lists without a default, and two numbers whose
sensible values are far from their limits. A test allows no key here that the schema can answer."""


def sections(catalogue: Catalogue) -> list[str]:
    """Pages of the reference: groups, then sections without options, then the other keys."""
    others = [name for name in catalogue.sections if name not in catalogue.options]
    return [*catalogue.options, *others, _ROOT]


def configuration_pages() -> dict[str, str]:
    """File name -> page, with the index."""
    catalogue = make_catalogue()
    pages = {f"{name}.md": _page(name, catalogue) for name in sections(catalogue)}
    return {"index.md": _index(catalogue), **pages}


def _index(catalogue: Catalogue) -> str:
    lines = [
        "# Configuration\n",
        "*For everyone who looks up an option or a key.*\n",
        f"{_HEAD}`python train.py --help GROUP` shows the same in a terminal.\n",
        "| page | contains | default | keys |",
        "| --- | --- | --- | --- |",
    ]
    for name in sections(catalogue):
        default = catalogue.defaults.get(name, "")
        about = _title(name, catalogue).partition(": ")[2]
        count = len(_keys(name, catalogue))
        lines.append(f"| [{name}]({name}.md) | {about} | {default and f'`{default}`'} | {count} |")
    return "\n".join(lines) + "\n"


def _title(name: str, catalogue: Catalogue) -> str:
    if name in GROUPS:
        return title(name)
    about = "keys without a group" if name == _ROOT else summary(catalogue.sections[name][0])
    return f"{name}: {about.rstrip('.')}"


def _page(name: str, catalogue: Catalogue) -> str:
    lines = [f"# {_title(name, catalogue)}\n", f"*For those who set {_named(name)}.*\n"]
    keys = _keys(name, catalogue)
    if name in catalogue.options:
        lines += [*_options(name, catalogue), ""]
    if keys:
        lines += ["## Keys\n", "| key | type | default | meaning | example |",
                  "| --- " * 5 + "|"]  # fmt: skip
        lines += [_key_row(row, name, catalogue) for row in keys.values()]
    return "\n".join(lines).rstrip("\n") + "\n"


def _named(name: str) -> str:
    return "the keys without a group" if name == _ROOT else f"`{name}`"


def _keys(name: str, catalogue: Catalogue) -> dict[str, KeyRow]:
    """Keys that a user can set, each as the first option has it, beginning with the default."""
    if name == _ROOT:
        return {row.key: row for row in key_rows("", "", catalogue)}
    if name in ENTRIES:
        return {row.key: row for row in key_rows(name, "none", catalogue)}
    if name not in catalogue.sections:
        return {}
    options = catalogue.options.get(name, {})
    default = catalogue.defaults.get(name)
    ordered = sorted(options, key=lambda option: option != default) or [""]
    found: dict[str, KeyRow] = {}
    for option in ordered:
        found = {row.key: row for row in key_rows(name, option, catalogue)} | found
    return {key: found[key] for key in catalogue.keys if key in found}


def _options(group: str, catalogue: Catalogue) -> Iterator[str]:
    default = catalogue.defaults.get(group)
    yield "## Options\n"
    yield f"The default is `{group}={default}`.\n" if default else ""
    sets = {option: _sets(group, option, catalogue) for option in catalogue.options[group]}
    yield "| option | description |" + " sets |" * any(sets.values())
    yield "| --- | --- |" + " --- |" * any(sets.values())
    summaries = option_summaries(group, catalogue)
    for option in sorted(catalogue.options[group], key=lambda each: (each != default, each)):
        text = summaries[option].rstrip(".")
        end = f" {sets[option]} |" * any(sets.values())
        yield f"| `{group}={option}` | {_plain(text)} |{end}"


def _sets(group: str, option: str, catalogue: Catalogue) -> str:
    """What an option's file sets: its base, then its values."""
    content = yaml.safe_load(catalogue.options[group][option].read_text()) or {}
    bases, typed = [], []
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            chosen = ((key.removeprefix("override ").strip("/"), entry[key]) for key in entry)
            typed += [f"{group}={value}" for group, value in chosen]
        elif entry != "_self_" and "schema/" not in entry:
            bases.append(f"as `{entry.removesuffix('@_here_').strip('/').replace('/', '=')}`")
    if rows := content.get("sweep", {}).get("rows"):
        content["sweep"] = {**content["sweep"], "rows": f"{len(rows)} named runs"}
    typed += [text for text in _flat(content) if text.partition("=")[0] not in ("option", "family")]
    more = ["..."] if typed[_MOST:] else []
    return ", ".join([*bases, *(f"`{each}`" for each in typed[:_MOST]), *more])


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_cell(value)}"


def _cell(value: Any) -> str:
    return str(value if isinstance(value, str) else format_value(value)).replace("|", "\\|")


def _key_row(row: KeyRow, section: str, catalogue: Catalogue) -> str:
    options = catalogue.options.get(section, {})
    name = row.key.rpartition(".")[2]
    if section in ENTRIES:
        options, field = {}, dict(class_fields(ENTRIES[section]))[name]
    else:
        field = catalogue.keys[row.key]
    having = catalogue.options_with(section, name) if options else []
    text = row.about
    if having and len(having) < len(options):
        shown = ", ".join(having[:4]) + (f" and {len(having) - 4} more" if having[4:] else "")
        text = f"Only {shown}. {text}"
    default = row.default if row.default == "required" else f"`{row.default}`"
    default += f": {row.null}" if row.null else ""
    typed = example(row.key, field)
    cells = [f"`{row.key}`", _type(row), _plain(default), _plain(text), f"`{typed}`"]
    return f"| {' | '.join(cells)} |"


def _type(row: KeyRow) -> str:
    """Type and limits: `integer, at least 1`."""
    word = row.type
    for long, short in _WORDS.items():
        word = re.sub(rf"^{re.escape(long)}", short, word)
    return f"{word}, {row.limits}" if row.limits else word


def example(key: str, field: Field) -> str:
    """An override with a valid value, other than the default if the type shows one."""
    if key not in _EXAMPLES:
        return derived_example(key, field)
    value = _EXAMPLES[key]
    quote = '"' if "'" in value else "'"
    quoted = f"{quote}{key}={value}{quote}"
    return quoted if re.search(r"[\s\[{*\\&]", value) else f"{key}={value}"


def derived_example(key: str, field: Field) -> str:
    """An override by the type, the limits and the default of a key."""
    if get_origin(field.kind) in (list, dict):
        return f"{key}={default_text(field, key)}"
    if issubclass(field.kind, Enum):
        others = [name for name in field.kind.__members__ if name != default_text(field, key)]
        return f"{key}={others[0]}"
    if field.kind is bool:
        return f"{key}={'false' if field.default else 'true'}"
    if field.kind in (int, float):
        return f"{key}={format_value(_number(field))}"
    return f"{key}={default_text(field, key) or 'TEXT'}"


def _number(field: Field) -> int | float:
    """A number in the limits: twice the default or nearer to one, else near the lower limit."""
    whole, default = field.kind is int, field.default or 0
    low = (field.limit.low or 0) if field.limit else 0
    high = field.limit.high if field.limit else None
    nearer = [default * 2, (default + 1) / 2] if default else []
    tenth = low + (1 if high is None or whole else (high - low) / 10)
    for value in (*nearer, low * 10, tenth, low + 1, low + 2, low):
        number = int(value) if whole else float(f"{value:.6g}")
        if number != field.default and (field.limit is None or field.limit.admits(number)):
            return number
    return field.default  # type: ignore[no-any-return]  # defaults have any type


def _plain(text: str) -> str:
    """Text of a table cell: no column of its own, and names of options as they are."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
