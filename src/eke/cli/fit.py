"""`eke fit`: find the fastest configuration that fits in memory with a few short trials."""

from collections.abc import Sequence

import eke
from eke.cli import make_parser, whole_number
from eke.config.compose import split_arguments
from eke.rules.techniques import Numerics
from eke.tuning.search.search_space import Objective
from eke.workflows import print_once, warn_and_set_loggers
from eke.workflows.autotune import TuneRequest, fit

_DESCRIPTION = """\
Finds the fastest configuration that fits and writes it as an option of `experiment`.

Takes the overrides of eke train. Groups that you set are kept. For the others (attention, compile,
kernels, memory, with --numerics also precision and optimizer) and the micro-batch, eke rejects
invalid combinations, forecasts the rest and tries the most promising. Samples per step and sample
lengths are kept. Groups, options and keys: eke train --help

  eke fit model=bert_large task=masked_lm batch.per_device=32 precision=bf16
  eke fit model=llama_1b --numerics mixed --name mine
  eke fit model=tiny plan_only=true          show the trials
  eke fit model=llama_1b hydra/launcher=command 'launcher.prefix=[ssh gpu1]' hardware=h100
"""

_FLAGS = {
    **dict.fromkeys(("--objective", "--numerics", "--budget-trials", "--name"), 1),
    "--json": 0,
}
"""Flag of `eke fit` -> number of its values."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser("fit", _DESCRIPTION)
    parser.add_argument(
        "--objective", choices=[each.value for each in Objective], default="speed",
        help="minimise time, peak memory, or device time per sample (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--numerics", choices=[each.value for each in Numerics], default="same",
        help="same: keep the formats (default). mixed: also 16-bit or TF32 products over float32 "
        "weights. reduced: also bfloat16 weights, float8 and 8-bit states",
    )  # fmt: skip
    parser.add_argument(
        "--budget-trials", type=whole_number(2), default=8, metavar="N",
        help="maximum number of trials of 20 steps, with the confirming trial (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--name", default="", help="name of the new option (default: "
        "fit_MODEL, with _memory, _mixed, ... for other objectives and numerics)",
    )  # fmt: skip
    about = "folder with your options, where the new option is written"
    parser.add_argument("--config-dir", metavar="FOLDER", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON, the content of fit.json")
    options, overrides = parser.parse_known_args(list(arguments))
    folder = ["--config-dir", options.config_dir] if options.config_dir else []
    typed = split_arguments([*folder, *overrides], _FLAGS)
    if typed.version:
        return print_once(f"eke {eke.__version__}")
    warn_and_set_loggers(typed)
    request = TuneRequest(
        tuple(word for word in arguments if word != "--json"),
        typed,
        Objective(options.objective),
        Numerics(options.numerics),
        options.budget_trials,
        options.name,
        options.json,
    )
    return fit(request)
