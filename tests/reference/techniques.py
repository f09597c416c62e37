"""docs/techniques.md: every option with its card, and where it has been seen running."""

from pathlib import Path

from reference.cards import TECHNIQUES, Card, read_cards
from reference.published import ROWS, SETTING, SOURCE
from reference.seen import Seen, describe, read_seen

from eke.compose.catalogue import GROUPS, make_catalogue

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
    parts = [HEAD, _machines(seen), _published()]
    for group in TECHNIQUES:
        parts.append(f"## {group}: {GROUPS[group]}\n")
        parts += [_option(card, seen) for card in read_cards(catalogue, group)]
    return "\n".join(parts)


def _machines(seen: list[Seen]) -> str:
    lines = [
        "*Ran on* a machine means that a run of a few steps on a tiny model ended well there:\n"
    ]
    for each in seen:
        names = ("torch", "transformers", "accelerate", "deepspeed", "peft")
        versions = [f"{name} {each.versions[name]}" for name in names if name in each.versions]
        lines.append(f"- {each.device}: {', '.join(versions)}")
    if not any(each.device != "CPU" for each in seen):
        lines.append("- GPUs: not yet measured")
    return "\n".join(lines) + "\n"


def _published() -> str:
    lines = [
        "## What the guides measured\n",
        f"{SETTING} ([the guide]({SOURCE})). The overrides go behind "
        "`python train.py experiment=guide_single_gpu`. Measured with eke: not yet.\n",
        "| technique | overrides | samples/s | GPU memory |",
        "| --- | --- | --- | --- |",
    ]
    for row in ROWS:
        speed = f"{row.samples_per_s:.2f}" if row.samples_per_s else ""
        lines.append(f"| {row.technique} | `{row.overrides}` | {speed} | {row.memory_mb} MB |")
    return "\n".join(lines) + "\n"


def _option(card: Card, seen: list[Seen]) -> str:
    lines = [f"### {card.command}\n", f"{_sentence(card.about)}. "
             f"*{_sentence(describe(card.command, seen))}.*\n"]  # fmt: skip
    lines += [f"- **{name}** {_linked(text)}" for name, text in card.lines.items()]
    return "\n".join(lines) + "\n"


def _linked(text: str) -> str:
    words = [f"<{word}>" if word.startswith("https://") else word for word in text.split()]
    return " ".join(words)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
