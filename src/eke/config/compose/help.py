"""`python train.py --help`: one screen, made from `conf/`, so that no option can be missing."""

import textwrap
from pathlib import Path

from eke.common.paths import program
from eke.config.compose.catalogue import GROUPS, make_catalogue

_WIDTH = 100
_HEAD = """\
eke finds, runs and compares the training recipes that get the most out of the GPUs you have.
usage: PROGRAM [-m] [group=option ...] [key=value ...]     (-m: several runs, one per value)
"""
_TAIL = """
keys:   group.key=value, e.g. train.steps=100 optimizer.lr=1e-4 seed=1;  --cfg job shows them all
flags:  -m, --config-dir FOLDER (your own options), --cell, --version, --hydra-help
runs:   one folder each under paths.runs (./runs), named by the configuration's identity

  PROGRAM precision=bf16 optimizer=adafactor
  PROGRAM -m precision=fp32,bf16,fp16 seed=0,1
  PROGRAM experiment=smoke hardware=cpu
  PROGRAM recipe=low_memory model=llama_1b plan_only=true"""


def help_text(config_dir: Path | None = None) -> str:
    """The help page: what eke is, each group with its options, four commands, where results go."""
    catalogue = make_catalogue(config_dir)
    lines = []
    for group, options in catalogue.options.items():
        default = catalogue.defaults.get(group)
        ordered = sorted(options, key=lambda option: (option != default, option))
        margin = f"  {group:<13}{GROUPS.get(group, ''):<29}"
        lines += textwrap.wrap(
            " ".join(ordered),
            width=_WIDTH,
            initial_indent=margin,
            subsequent_indent=" " * len(margin),
            break_long_words=False,
            break_on_hyphens=False,
        )
    heading = f"  {'group':<13}{'what it decides':<29}options, the default one first"
    return "\n".join([_HEAD, heading, *lines, _TAIL]).replace("PROGRAM", program())
