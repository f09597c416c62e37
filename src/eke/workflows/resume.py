"""Continue a named run with other ranks: `train.resume=RUN` (a folder, or an id in `runs`).

The run keeps its folder and id. Only the distribution of a step's samples may change:
`distributed.*` and `batch.*`, with the same samples per step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import RunPaths
from eke.common.text import format_value, override
from eke.config.compose import Arguments
from eke.config.compose.check_overrides import parse
from eke.config.schema import LAUNCH_GROUPS, Config
from eke.config.schema.codec import make_converter
from eke.plan.identity import PRESENTATION_KEYS, meaningful
from eke.plan.planner import Plan, cut_of, read_plan, remarks_on_cuts, replan, with_batch
from eke.plan.record import read_attempts
from eke.rules.distributed import why_not_elastic
from eke.workflows.export import find_run

_KEY = "train.resume"


def with_run_overrides(arguments: Arguments) -> Arguments:
    """Add the overrides of the run that the command names. Raise EkeError if it is unreadable."""
    typed = {_key_of(text): text for text in arguments.overrides}
    try:
        named = parse(typed[_KEY]).value()
    except Exception:  # of Hydra and ANTLR: the entire command is checked later
        return arguments
    if not isinstance(named, str | int):  # an id may have digits only
        return arguments
    before = read_plan(_find(str(named)))
    replaced = {*typed, *LAUNCH_GROUPS, "rerun", "plan_only"}
    kept = [
        text
        for text in before.overrides
        if not {_key_of(text), _key_of(text).partition(".")[0]} & replaced
    ]
    folder = Path(before.config_dir) if before.config_dir else None
    return replace(
        arguments,
        overrides=(*kept, *arguments.overrides),
        config_dir=arguments.config_dir or folder,
        cell=before.choices.get("sweep", "none") != "none",
    )


def _key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def continued(plan: Plan, in_sweep: bool = False) -> Plan:
    """Return the plan with the id and folder of the run that it names.

    Raises ConfigError if the run cannot continue with this plan, with one problem for each
    different key.
    """
    named = plan.config.train.resume
    assert named is not None, "a run is named"
    if in_sweep:
        why = "is for a single run, not for a launcher or a sweep"
        raise ConfigError(Problem(_KEY, named, why, Fix(f"{_KEY}=null"), "single_only"))
    paths = _find(named)
    before = read_plan(paths)
    if cut_of(before) != cut_of(plan) and (why := why_not_elastic(plan.config)):
        count = before.ranks.num_processes
        fix = Fix(f"distributed.num_processes={count}")
        raise ConfigError(Problem(_KEY, named, why, fix, "not_resumable"))
    old, new = (meaningful(make_converter().unstructure(p.config)) for p in (before, plan))
    problems = [*_other_values(old, new), *_batch_problems(before, plan)]
    if plan.config.rerun:
        why = f"conflicts with {_KEY}, which continues a run"
        problems.append(Problem("rerun", "true", why, Fix("rerun=false"), "conflicting_keys"))
    # The id was computed with the first attempt's division of the batch.
    first = next(iter(read_attempts(paths)), {}).get("cut")
    if not problems and _with_first_division(plan, first or cut_of(before)).run_id != before.run_id:
        why = "was started with other data, another kind of device or a numerically different eke"
        fix = Fix(f"{_KEY}=null", remark="starts another run")
        problems.append(Problem(_KEY, named, why, fix, "not_resumable"))
    if problems:
        raise ConfigError(problems)
    remarks = remarks_on_cuts(plan) if cut_of(before) != cut_of(plan) else ()
    train = replace(plan.config.train, resume=str(paths.folder.absolute()))
    return replace(
        plan,
        run_id=before.run_id,
        config=replace(plan.config, train=train),
        warnings=(*plan.warnings, *remarks),
    )


def _find(named: str) -> RunPaths:
    try:
        return find_run(named)
    except ConfigError as error:
        fix = Fix(f"{_KEY}=RUN_FOLDER", remark="its folder, or its id in runs")
        raise ConfigError([replace(each, key=_KEY, fix=fix) for each in error.problems]) from None


def _other_values(before: Any, now: Any, key: str = "") -> Iterator[Problem]:
    """Yield one problem for each different key outside of `distributed` and `batch`."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now} - {"distributed", "batch"}):
            path = f"{key}.{name}".lstrip(".")
            yield from _other_values(before.get(name), now.get(name), path)
    elif before != now:
        why = "differs from the resumed run. Only distributed.* and batch.* may change"
        yield Problem(key, format_value(now), why, Fix(override(key, before)), "not_resumable")


def _batch_problems(before: Plan, plan: Plan) -> list[Problem]:
    wanted, found = before.batch.samples_per_step, plan.batch.samples_per_step
    if wanted == found:
        return []
    why = f"gives {found} samples per step, but the resumed run has {wanted}"
    asked = plan.batch.world_size * plan.batch.devices
    count = max(number for number in range(1, asked + 1) if wanted % number == 0)
    each = wanted // count
    size = max(n for n in range(1, before.batch.per_device + 1) if each % n == 0)
    words = [f"batch.per_device={size}"]
    if plan.config.batch.target is None:
        words.append(f"batch.accumulation={each // size}")
    if count == asked:
        size = plan.batch.per_device
        return [Problem("batch.per_device", str(size), why, Fix(*words), "not_resumable")]
    why += f", which {asked} processes cannot share evenly"
    fix = Fix(f"distributed.num_processes={count}", *words)
    return [Problem("distributed.num_processes", str(asked), why, fix, "not_resumable")]


def _with_first_division(plan: Plan, cut: Mapping[str, Any]) -> Plan:
    """Return the plan with the `distributed` and `batch` of the run's first attempt."""
    plain = make_converter().unstructure(plan.config)
    for group, values in cut.items():  # keys outside of an id keep their present value
        kept = {key: plain[group][key] for key in PRESENTATION_KEYS.get(group, ())}
        plain[group] = values | kept
    config = make_converter().structure(plain, Config)
    return with_batch(replan(plan, config), config, [], [])
