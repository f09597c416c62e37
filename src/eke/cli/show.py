"""`eke show WHAT`: explain a key, an option or a group, or print all figures of a run."""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from eke.cli import make_parser
from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import read_json
from eke.common.output import write_line
from eke.common.paths import RunPaths, conf_folder, short_path, user_path
from eke.common.screen import fields, paint, width, wrap
from eke.common.text import closest_path
from eke.config.compose import help_text
from eke.config.compose.catalogue import Catalogue, key_rows, option_summaries, suggest_match
from eke.config.compose.composer import open_catalogue
from eke.config.compose.suggest import nearest_key
from eke.config.schema import ENTRIES
from eke.plan.record import EXIT_OK, RECORD_LIMIT, read_record
from eke.plan.record.find_folder import find_folder

_DESCRIPTION = """\
Explains a key, an option or a group (type, default, limits, rules and page), or prints all figures
of a run.

  eke show optimizer.lr
  eke show optimizer=muon
  eke show runs/9dfebed7d5fce6b0         or the beginning of an id: eke show 9dfe
"""

_VERDICTS = {
    "impossible": "rejected",
    "unsafe": "warning",
    "no_effect": "warning, without effect",
    "no_benefit": "warning, without benefit",
}
"""Name of `rules.rule.Severity` -> consequence."""


def main(arguments: Sequence[str]) -> int:
    """Print the explanation or the figures, and return the exit code."""
    parser = make_parser("show", _DESCRIPTION)
    about = "a key (optimizer.lr), an option (optimizer=muon), a group, or a run's folder or id"
    parser.add_argument("what", metavar="WHAT", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="folder with your options")
    options = parser.parse_args(arguments)
    folder = user_path(options.config_dir) if options.config_dir else None
    catalogue, what = open_catalogue(folder), options.what
    facts = _explain(what, catalogue)
    paths = None if facts else _find_run(what, catalogue)
    if options.json:
        content = read_json(paths.record, RECORD_LIMIT) if paths else facts
        text = json.dumps(content, indent=2)
    elif paths:
        text = _figures(paths)
    else:
        head = _key_text(facts) if "key" in facts else help_text(folder, what)
        text = "\n\n".join([head, *_details(facts)])
    write_line(text)
    return EXIT_OK


def _explain(what: str, catalogue: Catalogue) -> dict[str, Any]:
    """Return the facts about a key, an option or a group as plain values. Empty for others."""
    section, _, option = what.partition("=")
    facts: dict[str, Any] = {}
    group, _, name = what.partition(".")
    if group in ENTRIES and name:  # `metrics.bits.target`
        what = f"{group}.NAME.{name.rpartition('.')[2]}"
    if what in catalogue.keys or ".NAME." in what:
        section = what.partition(".NAME.")[0] if ".NAME." in what else what.rpartition(".")[0]
        each = {o: key_rows(section, o, catalogue) for o in catalogue.options.get(section, [""])}
        found = {o: row for o, rows in each.items() for row in rows if row.key == what}
        if found:  # not for keys that eke fills in
            usual = found.get(catalogue.defaults.get(section, ""), next(iter(found.values())))
            facts = dataclasses.asdict(usual)
            facts["defaults"] = {o: row.default for o, row in found.items()}
    elif option in catalogue.options.get(section, {}):
        text = catalogue.options[section][option].read_text()
        card = dict(re.findall(r"^# (Does|Costs|Saves|Needs|Source) +(.+)$", text, re.MULTILINE))
        rows = key_rows(section, option, catalogue) if section in catalogue.sections else []
        about = option_summaries(section, catalogue)[option]
        defaults = {row.key: row.default for row in rows}
        facts = {"option": what, "about": about, "card": card, "defaults": defaults}
    elif what in catalogue.options or what in catalogue.sections:
        facts = {"group": what, "options": option_summaries(what, catalogue)}
    if not facts:
        return facts
    from eke.rules import RULES  # planning code: its import is slow

    key = facts.get("key", section)  # a group has the rules of all its keys
    named = [rule for rule in RULES if f"{rule.key}.".startswith(f"{key}.")]
    if "option" in facts:
        named = [rule for rule in named if rule.key in (section, *facts["defaults"])]
    rules = [{"id": rule.id, "key": rule.key, "verdict": rule.verdict.name} for rule in named]
    page = f"docs/reference/configuration/{section or 'run'}.md"  # in a checkout or the package
    return facts | {"rules": rules, "page": short_path(conf_folder().parent / page)}


def _key_text(facts: dict[str, Any]) -> str:
    by_default: dict[str, list[str]] = {}
    for option, default in facts["defaults"].items():
        by_default.setdefault(default, []).append(option)
    default = ", ".join(f"{value} ({', '.join(names)})" for value, names in by_default.items())
    if len(by_default) == 1:
        default = facts["default"] + (f" ({facts['null']})" if facts["null"] else "")
    rows = {"type": facts["type"], "limits": facts["limits"], "default": default}
    head = wrap(facts["about"], width(), f"{paint(facts['key'], 'bold')}  ", "  ")
    return "\n".join([*head, *_fields(each for each in rows.items() if each[1])])


def _fields(rows: Iterable[tuple[str, str]]) -> list[str]:
    return fields([(paint(name, "cyan"), text) for name, text in rows], width(), 2)


def _details(facts: dict[str, Any]) -> list[str]:
    """Return blocks with the card, the rules and the page."""
    rules = {r["id"]: f"{r['key']}: {_VERDICTS[r['verdict']]}" for r in facts["rules"]}
    blocks = [
        _fields(facts.get("card", {}).items()),
        [paint("rules", "bold"), *_fields(rules.items())] if rules else [],
        _fields([("page", facts["page"])]),
    ]
    return ["\n".join(block) for block in blocks if block]


def _find_run(what: str, catalogue: Catalogue) -> RunPaths:
    """Return the run with this folder, or whose name begins so. ConfigError without exactly one."""
    path = find_folder(what, "WHAT")
    if RunPaths(path).record.exists():
        return RunPaths(path)
    if path.is_dir():
        fix = Fix(remark=f"eke status {what}")
        raise ConfigError(Problem("WHAT", what, "has no record.json", fix, "no_record"))
    group, _, option = what.partition("=")
    near = suggest_match(option, catalogue.options.get(group, {})) if option else None
    meant = f"{group}={near}" if near else nearest_key(group, catalogue) or closest_path(path)
    fix = Fix(remark=f"eke show {meant}" if meant else "eke train --help all")
    raise ConfigError(Problem("WHAT", what, "is no key, option, group or run", fix, "unknown_name"))


def _figures(paths: RunPaths) -> str:
    from eke.results.report.summary import group_figures

    record = read_record(paths)
    assert record is not None  # _find_run has seen the file
    blocks = [wrap(record.name, width(), f"{paint(record.outcome, 'bold')}  ")]
    for group, figures in group_figures(record).items():
        rows = [(name, ", ".join(filter(None, [value, note]))) for name, value, note in figures]
        blocks.append([paint(group, "bold"), *_fields(rows)])
    warnings = list(record.warnings)
    if record.shared_device:
        warnings.append("another process used the device: no speed above is a measurement")
    label = f"{paint('warning', 'yellow')}  "
    blocks.append([line for each in warnings for line in wrap(each, width(), label)])
    blocks.append([f"folder  {paths.folder}"])
    return "\n\n".join("\n".join(block) for block in blocks if block)
