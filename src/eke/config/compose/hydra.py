"""Run information flags of Hydra (`--cfg job`, `--info`, `--hydra-help`) and sweeps by Hydra."""

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.paths import conf_folder
from eke.common.plugins import LAUNCHERS, has_plugin, plugin_names
from eke.common.text import first_line
from eke.config.compose.catalogue import Catalogue, make_catalogue, shown, suggest_match
from eke.config.compose.check_overrides import find_problems
from eke.config.compose.command_line import FLAG_VALUES, LONG, Arguments
from eke.config.compose.compose_cache import hydra_base, hydra_state, to_hydra_override
from eke.config.compose.composer import open_catalogue
from eke.config.compose.hydra_settings import LAUNCHING
from eke.config.compose.own_code import search_path
from eke.config.schema import register

_QUESTIONS = ("--cfg", "--info", "--hydra-help")  # print information
_COMPANIONS = ("--resolve", "--package")  # modify --cfg
_OTHER = "would compose another configuration than eke's"
_REFUSED = {
    **dict.fromkeys(("--config-path", "-cp"), (_OTHER, "--config-dir FOLDER")),
    **dict.fromkeys(("--config-name", "-cn"), (_OTHER, "experiment=NAME")),
    "--experimental-rerun": ("would start a job pickled by Hydra", "the command in record.json"),
}
"""Flag -> its effect, and the replacement in eke."""


def check_info_flag(arguments: Arguments) -> None:
    """Raise ConfigError unless there is one information flag with a valid value."""
    # Hydra would print a traceback or its usage, or change the run.
    pairs = _pairs(arguments.hydra_flags)
    if problems := [*_wrong_flags(pairs)] or [*_wrong_together(pairs, arguments)]:
        raise ConfigError(problems)


def _pairs(flags: Sequence[str]) -> list[tuple[str, str]]:
    """Return each flag in its long form, with its value."""
    pairs: list[tuple[str, str]] = []
    for token in flags:
        if token.startswith("-"):
            pairs.append((LONG.get(token, token), ""))
        else:
            pairs[-1] = (pairs[-1][0], token)
    return pairs


def _wrong_flags(pairs: Sequence[tuple[str, str]]) -> Iterator[Problem]:
    for flag, value in pairs:
        known = FLAG_VALUES.get(flag, (value,))
        if flag in _REFUSED:
            why, instead = _REFUSED[flag]
            yield Problem(flag, value, why, Fix(remark=instead), "unsupported_flag")
        elif flag == "--package" and not value:
            fix = Fix(flag, "optimizer")
            yield Problem(flag, "", "needs a part of the configuration", fix, "missing_value")
        elif value not in known and (value or flag != "--info"):
            fix = Fix(
                flag, suggest_match(value, known) or known[0], *([value] if "=" in value else [])
            )
            yield Problem(flag, shown(value), f"can be {', '.join(known)}", fix, "wrong_argument")


def _wrong_together(pairs: list[tuple[str, str]], arguments: Arguments) -> Iterator[Problem]:
    questions = [pair for pair in pairs if pair[0] in _QUESTIONS]
    companions = [pair for pair in pairs if pair[0] in _COMPANIONS]
    if companions and "--cfg" not in dict(questions):
        fix = Fix("--cfg", "job", *filter(None, companions[0]))
        yield Problem(*companions[0], "needs --cfg", fix, "conflicting_flags")
    elif len(questions) > 1:
        first, second = (" ".join(pair).strip() for pair in questions[:2])
        fix = Fix(*filter(None, questions[1]))
        yield Problem(second, "", f"conflicts with {first}", fix, "conflicting_flags")
    elif arguments.multirun and questions[0][0] != "--hydra-help":
        why = "shows one configuration. plan_only=true lists the runs of a sweep"
        fix = Fix("-m", *dict.fromkeys([*arguments.overrides, "plan_only=true"]))
        yield Problem(*questions[0], why, fix, "conflicting_flags")


def run_hydra_flags(arguments: Arguments) -> str:
    """Return Hydra's output for flags that passed `check_info_flag`. ConfigError if it fails."""
    # A bare --info would consume the first override.
    pairs = [(f, v or "all") if f == "--info" else (f, v) for f, v in _pairs(arguments.hydra_flags)]
    flags = [word for pair in pairs for word in pair if word]
    catalogue = make_catalogue(arguments.config_dir)
    answer, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(complaint):
            # Hydra's help does not depend on overrides, and would fail with them.
            overrides = () if "--hydra-help" in flags else arguments.overrides
            _run_hydra(flags, overrides, catalogue, lambda _: None)
    except SystemExit as ended:
        if ended.code:
            said = complaint.getvalue().strip().splitlines() or ["Hydra printed no reason"]
            flag = " ".join(arguments.hydra_flags)
            raise ConfigError(Problem(flag, "", said[-1], id="hydra_failed")) from ended
    sys.stderr.write(complaint.getvalue())
    return answer.getvalue().removesuffix("\n")


def _run_hydra(
    flags: Sequence[str],
    overrides: Sequence[str],
    catalogue: Catalogue,
    task: Callable[[Any], float | None],
) -> None:
    register()
    folder = [search_path(catalogue.own_folder)] if catalogue.own_folder else []
    main = hydra.main(config_path=str(conf_folder()), config_name="config", **hydra_base())
    before = sys.argv
    taken = (to_hydra_override(text, catalogue) for text in overrides)
    sys.argv = [before[0], *flags, *folder, *taken]
    try:
        main(task)()
    finally:
        sys.argv = before


_Job = Callable[[tuple[str, ...], Path | None], float | None]
"""Function of a run's overrides and the user's folder that returns the objective, the loss.
Hydra's plugins compose, start and count the jobs. Hydra handles their exceptions."""

LOCAL, SWEEPER = "local", "eke"
"""Default options of these groups."""

_PLUGINS = {
    "hydra/launcher": ("joblib", "ray", "rq", "submitit"),
    "hydra/sweeper": ("ax", "nevergrad", "optuna"),
}
"""Options, up to `_`, of Hydra's plugins: `joblib` is hydra-joblib-launcher
(https://hydra.cc/docs/plugins/, Hydra 1.3)."""


def is_for_hydra(overrides: Sequence[str]) -> bool:
    """Return whether the overrides choose or configure a launcher or sweeper of Hydra."""
    return any(_is_foreign(text) or _is_setting(text) for text in overrides)


def launcher_of(overrides: Sequence[str]) -> str:
    """Return the option of `hydra/launcher`, `local` by default."""
    typed = [text.partition("=")[2] for text in overrides if text.startswith("hydra/launcher=")]
    return typed[-1] if typed else LOCAL


def needs_sweep(overrides: Sequence[str]) -> bool:
    """Return whether the launcher starts a single run as a sweep, as all except `local` do."""
    launcher = launcher_of(overrides)
    return launcher != LOCAL and has_plugin(LAUNCHERS, launcher)


def _is_foreign(text: str) -> bool:
    group, _, option = text.partition("=")
    if group == "hydra/launcher":
        return not has_plugin(LAUNCHERS, option)
    return group == "hydra/sweeper" and option != SWEEPER


def _is_setting(text: str) -> bool:
    return bool(re.match(r"\+*hydra\.(launcher|sweeper)\b", text))


def sweep_by_hydra(overrides: Sequence[str], config_dir: Path | None, job: _Job) -> None:
    """Run a sweep by Hydra. ConfigError for invalid overrides, before any run starts."""
    catalogue = open_catalogue(config_dir)
    problems = [p for text in overrides for p in _wrong(text, catalogue)]
    problems += _without_plugin(overrides)
    sweepers = [t for t in overrides if t.startswith("hydra/sweeper=") and _is_foreign(t)]
    if needs_sweep(overrides) and sweepers:
        launcher = launcher_of(overrides)
        why, fix = f"needs eke's sweeper, not {sweepers[-1]}", Fix("hydra/sweeper=eke")
        problems.append(Problem("hydra/launcher", launcher, why, fix, "conflicting_plugins"))
    if problems:
        raise ConfigError(problems)
    # Hydra has no options `local` and `eke`.
    foreign = [t for t in overrides if _is_foreign(t) or t.partition("=")[0] not in LAUNCHING]

    def run_job(_: Any) -> float | None:
        """Run one job of Hydra, composed again with schema types and checks."""
        return job(tuple(HydraConfig.get().overrides.task), catalogue.own_folder)

    full = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing a traceback
    if sweepers:  # show the best values, which the sweeper logs
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        logging.getLogger("hydra_plugins").setLevel(logging.INFO)
    try:
        _run_hydra(["-m"], foreign, catalogue, run_job)
    except Exception as error:
        of_a_job = any(frame.name == "run_job" for frame in extract_tb(error.__traceback__))
        elsewhere = type(error.__cause__).__name__ == "_RemoteTraceback"  # a process of loky
        if isinstance(error, EkeError | OSError) or of_a_job or elsewhere:
            raise
        chosen = " ".join(text for text in overrides if _is_foreign(text))
        fix = Fix("hydra/launcher=local", "hydra/sweeper=eke")
        raise ConfigError(Problem(chosen, "", first_line(error), fix, "hydra_failed")) from error
    finally:
        os.environ["HYDRA_FULL_ERROR"] = full


def _wrong(text: str, catalogue: Catalogue) -> list[Problem]:
    key, _, value = text.lstrip("+").partition("=")
    if key in ("sweep", *(k for k in catalogue.keys if k.startswith("sweep."))):
        why = "needs eke's sweeper. Sweepers of Hydra read the overrides and hydra.sweeper.params"
        fix = Fix(remark="KEY=VALUE,VALUE")
        problem = Problem(key, shown(value), why, fix, "conflicting_plugins")
        return [] if text == "sweep=none" else [problem]
    if key.startswith("hydra"):
        return []
    return find_problems(text, catalogue, multirun=True)


def _without_plugin(overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield problems of missing plugins and of settings without a chosen plugin."""
    with hydra_state():
        loader = GlobalHydra.instance().config_loader()
        known = {group: loader.get_group_options(group) for group in LAUNCHING}
    chosen = {text.partition("=")[0] for text in overrides if _is_foreign(text)}
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if _is_foreign(text) and value not in known[key]:
            yield _not_installed(key, value, known[key])
        elif _is_setting(text) and (group := "hydra/" + key.split(".")[1]) not in chosen:
            why, fix = f"needs an option of {group}", Fix(f"{group}={_PLUGINS[group][0]}", text)
            yield Problem(key, shown(value), why, fix, "missing_plugin")


def _not_installed(group: str, option: str, known: Sequence[str]) -> Problem:
    plugin, kind = option.split("_")[0], group.partition("/")[2]
    if plugin in _PLUGINS[group]:
        # hydra-optuna-sweeper 1.3 requires optuna<3, but works with 4.
        first = "optuna && pip install --no-deps " if plugin == "optuna" else ""
        fix = Fix(remark=f"pip install {first}hydra-{plugin}-{kind}")
        return Problem(group, option, "is not installed", fix, "package_missing")
    own = plugin_names(LAUNCHERS) if group == "hydra/launcher" else [SWEEPER]
    options = [*own, *known, *_PLUGINS[group]]
    why = f"unknown option. Options: {', '.join(dict.fromkeys(options))}"
    fix = Fix(f"{group}={suggest_match(option, options) or own[0]}")
    return Problem(group, shown(option), why, fix, "unknown_option")
