"""`eke plan`: show all decisions of a configuration and its estimated cost, without running it."""

from eke import workflows
from eke.workflows import print_once

HELP = """\
usage: eke plan [-m] [--why] [--quick] [--json] [--config-dir FOLDER] [overrides]

Every decision that a configuration leaves open, with its reason; how much of its device's memory
it takes, and whether it fits; how long a step takes, as an estimate. Nothing is run, and no GPU is
needed: hardware=h100 plans for another machine.

It takes the overrides of eke train. Groups, their options and keys: eke train --help

  --why            also what dominates memory, and overrides that reduce it
  --quick          at once: memory by formulas, unless a trace is kept
  --json           for machines, under the paths of a record
  -m               every cell of a sweep, and the GPU-hours of all
  hardware=all     every known GPU: does it fit, its largest micro-batch, its speed
  --config-dir FOLDER   your own options
  -h, --help       this

  eke plan model=llama_1b precision=bf16 hardware=rtx3090 --why
  eke plan model=llama_1b precision=bf16 hardware=all
  eke plan model=llama_1b batch=auto batch.target=64 hardware=h100
  eke plan -m precision=fp32,bf16 optimizer=adamw,adafactor
"""

FLAGS = ("--json", "--why", "--quick")


def main(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    if "--help" in arguments or "-h" in arguments:
        return print_once(HELP.rstrip("\n"))
    overrides = [each for each in arguments if each not in FLAGS]
    as_json, why, quick = (flag in arguments for flag in FLAGS)
    typed = [*overrides, "plan_only=true"]
    return workflows.main(
        typed, as_json=as_json, why=why, trace=not quick, also=dict.fromkeys(FLAGS, 0)
    )
