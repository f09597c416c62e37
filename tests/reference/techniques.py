"""docs/reference/techniques.md: every option with its card, and where it has been seen running."""

import re
from pathlib import Path

from reference.cards import TECHNIQUES as GROUPS_WITH_CARDS
from reference.cards import Card, read_cards
from reference.gpu import lines_of, read_gpus, where_seen
from reference.measured import Measured, cell, read_measured
from reference.published import ROWS, SETTING, SOURCE, published
from reference.seen import Seen, observations, read_seen

from eke.config.compose.catalogue import GROUPS, make_catalogue
from eke.rules.techniques import TECHNIQUES, Numerics

HEAD = """\
# Techniques

Generated from the option files in `conf/`, the guides' table and the records in `results/`; change
those and run `EKE_UPDATE=1 pytest tests/conf/test_reference.py`. What excludes what is in
[rules.md](rules.md).

Choose with `python train.py group=option`; compare with `python train.py -m group=option,option`.
"""


def techniques_page(results: Path) -> str:
    """The whole page, ending in a newline."""
    catalogue, seen = make_catalogue(), read_seen(results)
    parts = [HEAD, _machines(seen, results), _published(read_measured(results)), _table()]
    for group in GROUPS_WITH_CARDS:
        parts.append(f"## {group}: {GROUPS[group][0]}\n")
        parts += [_option(card, seen, results) for card in read_cards(catalogue, group)]
    return "\n".join(parts)


def _machines(seen: list[Seen], results: Path) -> str:
    lines = [
        "*Ran on* a machine means that a run of a few steps of eke's default model, 0.8 million "
        "parameters, ended well there; the line *On* that machine has what the run saw that the "
        "plain run has not (`python benchmarks/techniques.py`). On a CPU that shows what an option "
        "does, and says nothing about its speed on a GPU. *Ran in tests* on a GPU means that its "
        "tests in `tests/gpu` passed there, *trained* that one of the [single runs]"
        "(benchmarks.md#i-single-runs-on-a-gpu) used it.\n"
    ]
    gpus = read_gpus(results)
    for each in [*seen, *gpus]:
        names = ("torch", "transformers", "accelerate", "deepspeed", "peft")
        versions = [f"{name} {each.versions[name]}" for name in names if name in each.versions]
        lines.append(f"- {each.device}: {', '.join(versions)}")
    if not gpus and not any(each.device != "CPU" for each in seen):
        lines.append("- GPUs: not yet measured")
    return "\n".join(lines) + "\n"


def _published(measured: list[Measured]) -> str:
    devices = ", ".join(each.device for each in measured)
    with_eke = f"Measured with eke on {devices}: the last columns" if measured else (
        "Measured with eke: not yet (`python benchmarks/on_gpu.py --stages memory`)"
    )  # fmt: skip
    heads = [f"eke on {each.device}" for each in measured]
    lines = [
        "## What the guides measured\n",
        f"{SETTING} ([the guide]({SOURCE})). The overrides go behind "
        f"`python train.py experiment=guide_single_gpu`. {with_eke}.\n",
        " | ".join(["| technique", "overrides", "samples/s", "GPU memory", *heads]) + " |",
        "| --- " * (4 + len(heads)) + "|",
    ]
    for row in ROWS:
        speed = f"{row.samples_per_s:.2f}" if row.samples_per_s else ""
        cells = [cell(each.rows.get(row.technique)) for each in measured]
        words = [f"| {row.technique}", f"`{row.overrides}`", speed, f"{row.memory_mb} MB", *cells]
        lines.append(" | ".join(words) + " |")
    return "\n".join(lines) + "\n"


TRAINING = {
    Numerics.same: "equivalent",
    Numerics.mixed: "rounding changes",
    Numerics.reduced: "training changes",
}


def _table() -> str:
    """The table of techniques that recipes, memory advice and `eke fit` choose from."""
    lines = [
        "## What recipes, memory advice and eke fit choose from\n",
        "A slowdown is the time of a step over that without the technique, as published; on your "
        "machine it may differ. *fit* marks what `eke fit` tries.\n",
        "| overrides | saves | slowdown | training | devices | fit |",
        "| --- " * 6 + "|",
    ]
    for each in TECHNIQUES.values():
        found = each.published
        slowdown = "" if found is None else f"{found.slowdown:.2f}"
        if found is not None and found.source:
            slowdown += f": {_linked(found.source)}"
        devices = ", ".join({"cpu": "CPU", "cuda": "GPU"}[kind] for kind in each.devices)
        row = [f"`{each.name}`", each.saves, slowdown, TRAINING[each.numerics], devices]
        lines.append(f"| {' | '.join([*row, 'yes' if each.searched else ''])} |")
    return "\n".join(lines) + "\n"


def _option(card: Card, seen: list[Seen], results: Path) -> str:
    lines = [f"### {card.command}\n", f"{_sentence(card.about)}. "
             f"*{_sentence(where_seen(card.command, results))}.*\n"]  # fmt: skip
    for pair in (("Does",), ("Saves", "Costs"), ("Needs", "Source")):
        said = [f"**{name}** {_linked(card.lines[name])}" for name in pair if name in card.lines]
        lines += [f"- {'. '.join(said)}"] if said else []
    lines += [f"- **Guides** {_linked(text)}" for text in published(card.command)]
    lines += [*observations(card.command, seen), *lines_of(card.command, read_gpus(results))]
    return "\n".join(lines) + "\n"


def _linked(text: str) -> str:
    return re.sub(r"https://[^\s)]+?(?=[,;.]?(?:[\s)]|$))", r"<\g<0>>", text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
