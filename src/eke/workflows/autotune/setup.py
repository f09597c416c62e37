"""Everything of a search before its first trial: seconds, and no process."""

import shlex
from functools import partial

from eke.common.errors import ConfigError, Problem
from eke.common.paths import conf_folder, program
from eke.config.compose import Composed, compose, launcher_of, multirun
from eke.estimate.time import StepTime, forecast_time
from eke.launch import place_of, sweep_id, sweep_paths
from eke.launch.slurm import place_in_cluster
from eke.plan.planner import Plan
from eke.results.report import PlanningLine
from eke.tuning.recipes import RECIPES
from eke.tuning.search import (
    Candidates,
    Numerics,
    Objective,
    Search,
    axes_for,
    cut_overrides,
    describe_candidates,
    enumerate_candidates,
    free_path,
    group_of,
    own_path,
    refuse_what_is_no_name,
    spelt_out,
    trial_overrides,
)
from eke.workflows.autotune.session import Fitting, Wish
from eke.workflows.cached_result import plan_unless_answered
from eke.workflows.console import say
from eke.workflows.planning import plan_for
from eke.workflows.recipes import chosen_overrides
from eke.workflows.sweep import misplaced

ONE_VALUE = (
    "a search starts from one value and tries others by itself (of precision with --numerics "
    "mixed): type one, or leave it out"
)


def prepare(wish: Wish) -> Fitting:
    """Everything before the first trial; seconds, and no process.

    Raises:
        ConfigError: the command is wrong, or nothing of it can run.
    """
    arguments = wish.arguments
    refuse_what_is_no_start(wish)
    if wish.name:
        refuse_what_is_no_name(wish.name)
    in_cluster = launcher_of(arguments.overrides) == "slurm"
    try:
        composed = compose(arguments.overrides, arguments.config_dir, in_sweep=True)
    except ConfigError as error:
        swept = [p for p in error.problems if p.fix.startswith(multirun())]
        rest = [p for p in error.problems if p not in swept]
        one = [Problem(p.path, p.value, ONE_VALUE) for p in swept]
        raise ConfigError(one + rest) from error
    refuse_what_is_searched(composed)
    if problem := misplaced(composed.config.launcher, in_cluster):
        raise ConfigError(problem)
    baseline = plan_for(composed, planning=True, in_cluster=in_cluster, refuse=False)
    if not baseline.device.present and not composed.config.plan_only:
        why = f"this machine has no {baseline.device.name}, and a search runs trials"
        raise ConfigError(
            Problem("hardware", composed.config.hardware.option, why, "plan_only=true")
        )
    option = wish.name or usual_name(baseline.choices["model"], wish)
    place_of_option = free_path if not composed.config.plan_only else own_path
    place_of_option(arguments.config_dir or conf_folder(), option)  # before anything takes time
    axes = axes_for(baseline.choices, composed.overrides, baseline.device, wish.numerics)
    composed = pinned(composed, baseline)
    axes = [spelt_out(axis, baseline.config, composed, arguments.config_dir) for axis in axes]
    if not composed.config.plan_only:
        refuse_what_cannot_start(composed, baseline, in_cluster)
    line = PlanningLine()
    found = enumerate_candidates(
        baseline, composed, axes, arguments.config_dir, expected_step_s, line.combined
    )
    line.close()
    say(describe_candidates(found, baseline, wish.numerics))
    refuse_what_leaves_no_choice(found, composed)
    points = [candidate.point for candidate in found.found]
    search = Search(points, wish.objective, wish.budget, found.first)
    which = [text for text in composed.overrides if not text.startswith("hydra")]
    words = ("fit", wish.objective.value, wish.numerics.value, *which)
    identity = sweep_id([words], [composed.config] if composed.config_dir else [])
    paths = sweep_paths(composed.config.paths.runs, identity)
    return Fitting(wish, composed.overrides, found, search, baseline, paths, option)


def refuse_what_leaves_no_choice(found: Candidates, composed: Composed) -> None:
    """Trials of one configuration alone would tell nothing that its run does not.

    Raises:
        ConfigError: there is no candidate, or none but what was typed.
    """
    rules = ", ".join(sorted(found.refused))
    if not found.found:
        why = "nothing that could be tried fits into memory"
        if not found.too_large:
            why = f"rules refuse all that could be tried: {rules}"
        fix = f"eke plan --why {' '.join(composed.overrides)}"
        raise ConfigError(Problem("eke fit", "", why, fix))
    if len(found.found) > 1 or found.first is None:
        return
    reasons = ["groups that were typed stay as they are"]
    reasons += [f"rules refuse the rest: {rules}"] if found.refused else []
    reasons += ["larger ones cannot fit"] if found.too_large else []
    why = f"there is nothing to choose from but what was typed ({'; '.join(reasons)})"
    fix = f"{shlex.join([*program().split(), *composed.overrides])}   (or leave a group open)"
    raise ConfigError(Problem("eke fit", "", why, fix))


def usual_name(model: str, wish: Wish) -> str:
    """Of the option, where none is typed: searches for different things do not replace each other.

    Args:
        model: option of the group.
        wish: what was asked for.
    """
    parts = ["fit", model]
    parts += [wish.objective.value] if wish.objective is not Objective.speed else []
    parts += [wish.numerics.value] if wish.numerics is not Numerics.same else []
    return "_".join(parts)


def pinned(composed: Composed, baseline: Plan) -> Composed:
    """The same as typed without a recipe that adapts, which would answer each candidate anew.

    The micro-batch is the search's own.
    """
    if composed.choices.get("recipe") not in RECIPES:
        return composed
    every = chosen_overrides(baseline, composed.config_dir)
    chosen = [text for text in every if group_of(text) != "batch"]
    typed = [text for text in composed.overrides if not text.startswith("recipe=")]
    return compose([*typed, *chosen], composed.config_dir, in_sweep=True)


def refuse_what_is_no_start(wish: Wish) -> None:
    """A search starts from one configuration, and takes its time: nothing typed is passed over.

    Raises:
        ConfigError: several configurations are named, or Hydra is asked for something.
    """
    arguments = wish.arguments
    one = "and a search starts from one configuration"
    typed = shlex.join(arguments.overrides)
    problems = []
    if arguments.multirun:
        without = [word for word in wish.command if word not in ("-m", "--multirun")]
        fix = shlex.join(["eke", "fit", *without])
        problems.append(Problem("-m", "", f"spans a sweep, {one}", fix))
    if arguments.hydra_flags:
        flag, *values = arguments.hydra_flags
        question = shlex.join([*arguments.hydra_flags, *arguments.overrides])
        why = "is a question about one configuration, and a search has many"
        problems.append(Problem(flag, " ".join(values), why, f"{program()} {question}"))
    for text in arguments.overrides:
        key, _, value = text.lstrip("+").partition("=")
        if (key == "sweep" and value != "none") or key.startswith("sweep."):
            why = f"is about a set of runs, {one}"
            problems.append(Problem(key, value, why, f"{program()} -m {typed}"))
    if problems:
        raise ConfigError(problems)


def refuse_what_cannot_start(composed: Composed, baseline: Plan, in_cluster: bool) -> None:
    """What the first trial would be refused for, unless a record answers it: a missing package.

    Its size is left out: another way to compute the same may fit.

    Args:
        composed: what was typed.
        baseline: the same, planned.
        in_cluster: trials run on nodes of a cluster.

    Raises:
        ConfigError: every rule that it breaks.
    """
    first = trial_overrides(composed.overrides, cut_overrides(baseline), 0)
    trial = compose(first, composed.config_dir, in_sweep=True)
    plan_unless_answered(
        partial(plan_for, trial, in_cluster=in_cluster, refuse=False, trace=False),
        place_in_cluster if in_cluster else place_of,
    )


def refuse_what_is_searched(composed: Composed) -> None:
    """What has no meaning for a search.

    Raises:
        ConfigError: a key is typed that only a run or a sweep has.
    """
    config = composed.config
    one_run = "is about one run; trials are answered from their records"
    meant_otherwise = {
        "rerun": (config.rerun, one_run),
        "repeat": (config.repeat, one_run),
        "ignore_forecast": (config.ignore_forecast, one_run),
        "launcher.detach": (
            config.launcher.detach,
            "somebody has to wait: each trial is chosen by what those before it found",
        ),
    }
    for key, (wanted, why) in meant_otherwise.items():
        if wanted:
            usual = type(wanted)()  # False of a switch, 0 of a number
            raise ConfigError(Problem(key, str(wanted).lower(), why, f"{key}={usual}".lower()))


def expected_step_s(plan: Plan) -> float | None:
    """Seconds per optimizer step by the time model; None where it says nothing."""
    found = forecast_time(plan)
    return found.step_s.expected if isinstance(found, StepTime) else None
