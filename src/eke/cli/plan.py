"""`eke plan`: show all decisions of a configuration and its estimated cost."""

from eke import workflows
from eke.cli import reflow
from eke.common.screen import width
from eke.workflows import print_once

_HELP = """\
usage: eke plan [-m] [--why] [--quick] [--json] [--config-dir FOLDER] [overrides]

Shows every decision that a configuration leaves open, with its reason, the memory use, whether it
fits, and the estimated time of a step. It does not train and needs no GPU: hardware=h100 plans for
another device.

Takes the overrides of eke train. Groups, options and keys: eke train --help

  --why            also show the largest memory use and overrides that reduce it
  --quick          use formulas if there is no cached trace (milliseconds)
  --json           print JSON with the keys of a record
  -m               plan every run of a sweep, and the total GPU-hours
  hardware=all     all known GPUs: fit, largest micro-batch, speed
  --config-dir FOLDER   folder with your options
  -h, --help       this help

  eke plan model=llama_1b precision=bf16 hardware=rtx3090 --why
  eke plan model=llama_1b precision=bf16 hardware=all
  eke plan model=llama_1b batch=auto batch.target=64 hardware=h100
  eke plan -m precision=fp32,bf16 optimizer=adamw,adafactor
"""

FLAGS = ("--json", "--why", "--quick")


def main(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    if "--help" in arguments or "-h" in arguments:
        return print_once(reflow(_HELP, width()))
    overrides = [each for each in arguments if each not in FLAGS]
    as_json, why, quick = (flag in arguments for flag in FLAGS)
    typed = [*overrides, "plan_only=true"]
    return workflows.main(
        typed, as_json=as_json, why=why, trace=not quick, also=dict.fromkeys(FLAGS, 0)
    )
