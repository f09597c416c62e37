"""What a search leaves: an option of `experiment`, and a small report beside its trials."""

import shlex
from dataclasses import asdict
from datetime import UTC, datetime

from eke.common.files import write_atomic, write_json
from eke.common.paths import conf_folder, program
from eke.common.units import format_number
from eke.config.compose import compose
from eke.tuning.search import (
    Fit,
    describe_candidates,
    describe_fit,
    free_path,
    short_name,
    without,
    write_experiment,
)
from eke.workflows.autotune.session import Fitting
from eke.workflows.console import say

REPORT, VALUES = "fit.md", "fit.json"
"""Files in the folder of a search."""


def keep(fitting: Fitting, fit: Fit) -> None:
    """Write all that was found, and say where.

    Args:
        fitting: the search.
        fit: how it ended.

    Raises:
        ConfigError: there is an option of that name that somebody else has written.
        OSError: a folder cannot be written.
    """
    folder = fitting.paths.folder
    text = describe_fit(fit, fitting.baseline)
    command = shlex.join(["eke", "fit", *fitting.wish.command])
    write_atomic(folder / REPORT, _report(command, fitting, fit, text))
    write_json(folder / VALUES, _values(command, fitting, fit))
    say(f"\n{text}")
    if fit.is_found:
        assert fit.best is not None
        _keep_option(fitting, fit.best.candidate.overrides, text)
    else:
        _keep_none(fitting, fit)
    say(f"\n  {folder / REPORT}   (all trials: eke report {shlex.quote(str(folder))})")


def _keep_option(fitting: Fitting, winner: tuple[str, ...], text: str) -> None:
    """Write the best as an option of `experiment`, and say how to run it."""
    own, name = fitting.wish.arguments.config_dir, fitting.option
    best = compose([*without(fitting.typed, winner), *winner], own, in_sweep=True)
    evidence = [*text.splitlines(), f"{fitting.paths.folder / REPORT}"]
    path = write_experiment(best, name, own, own or conf_folder(), evidence)
    say(f"\nwritten to {path}:\n  {_command(fitting, f'experiment={name}')}")


def _keep_none(fitting: Fitting, fit: Fit) -> None:
    """Say what whoever expects an option should know."""
    if fit.best is not None and fit.best is not fit.typed:
        winner = fit.best.candidate.overrides
        typed = _command(fitting, *without(fitting.typed, winner), *winner)
        say(f"\nnothing is written: what was typed may be as good\n  {typed}")
    path = free_path(fitting.wish.arguments.config_dir or conf_folder(), fitting.option)
    if path.exists():
        say(f"\n{path} is what an earlier search found, and stays as it is")


def _command(fitting: Fitting, *overrides: str) -> str:
    """What starts a run, with the folder of options that was typed."""
    own = fitting.wish.arguments.config_dir
    return shlex.join(
        [*program().split(), *(["--config-dir", str(own)] if own else []), *overrides]
    )


def _report(command: str, fitting: Fitting, fit: Fit, text: str) -> str:
    """What there was to choose from, how much of it was tried, and what came of it."""
    baseline, wish = fitting.baseline, fitting.wish
    when = datetime.now(UTC).isoformat(timespec="seconds")
    space = describe_candidates(fit.candidates, baseline, wish.numerics)
    tried = f"  tried: {len(fit.standings)}, by {format_number(len(fit.trials), 'trial')}"
    heading = f"# {command}\n\n{baseline.device.name}, {when}"
    return f"{heading}\n\n```\n{space}\n{tried} of at most {wish.budget}\n\n{text}\n```\n"


def _values(command: str, fitting: Fitting, fit: Fit) -> dict[str, object]:
    gain = fit.gain
    return {
        "schema_version": 1,
        "command": command,
        "objective": fit.objective.value,
        "numerics": fit.numerics.value,
        "device": fitting.baseline.device.name,
        "num_configurations": len(fit.candidates.found),
        "refused": fit.candidates.refused,
        "num_too_large": fit.candidates.too_large,
        "best": list(fit.best.candidate.overrides) if fit.best else None,
        "option": fitting.option if fit.is_found else None,
        "gain": {**asdict(gain), "of": gain.of.value} if gain else None,
        "trials": [
            {
                "configuration": short_name(fit.candidates.found[t.number], fitting.baseline),
                "overrides": list(fit.candidates.found[t.number].overrides),
                "expected_s": fit.candidates.found[t.number].point.expected_s,
                **asdict(t),
            }
            for t in fit.trials
        ],
    }
