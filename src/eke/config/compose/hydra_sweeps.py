"""Sweeps by Hydra's own machinery: another launcher, another sweeper, as their plugins have them.

They compose, start and count the jobs; each job is one run of eke's, and its loss the objective.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from eke.common.errors import ConfigError, Problem
from eke.common.paths import conf_folder
from eke.config.compose.catalogue import Catalogue
from eke.config.compose.compose_cache import as_hydra_takes_it, hydra_state
from eke.config.compose.composer import open_catalogue
from eke.config.compose.formatting import as_typed, closest, multirun, shown
from eke.config.compose.overrides import find_problems, parse
from eke.config.schema import register

Job = Callable[[tuple[str, ...], Path | None], float | None]
"""Overrides and the user's folder -> the objective; what it raises, Hydra sees."""

OWN = {"hydra/launcher": ("local", "slurm"), "hydra/sweeper": ("eke",)}
"""What eke does itself, without Hydra."""

PACKAGES = {
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher",
        "ray": "hydra-ray-launcher",
        "ray_aws": "hydra-ray-launcher",
        "rq": "hydra-rq-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
    },
    "hydra/sweeper": {
        "ax": "hydra-ax-sweeper",
        "nevergrad": "hydra-nevergrad-sweeper",
        "optuna": "hydra-optuna-sweeper",
    },
}
"""Option -> the package that brings it (https://hydra.cc/docs/plugins/, Hydra 1.3)."""


def is_for_hydra(overrides: Sequence[str]) -> bool:
    """Whether a launcher or a sweeper is typed that is not eke's own, or a setting of one."""
    return any(_is_foreign(text) or _is_setting(text) for text in overrides)


def launcher_of(overrides: Sequence[str]) -> str:
    """Which of eke's own launchers is typed; `local` where none is."""
    typed = [text.partition("=")[2] for text in overrides if text.startswith("hydra/launcher=")]
    return typed[-1] if typed else OWN["hydra/launcher"][0]


def _is_foreign(text: str) -> bool:
    group, _, option = text.partition("=")
    return group in OWN and option not in OWN[group]


def _is_setting(text: str) -> bool:
    return bool(re.match(r"\+*hydra\.(launcher|sweeper)\b", text))


def sweep_by_hydra(overrides: Sequence[str], config_dir: Path | None, job: Job) -> None:
    """Let Hydra run the sweep.

    Raises:
        ConfigError: the plugin is not installed, or an override is wrong; nothing has started.
        Exception: what a job raised, or the plugin.
    """
    config_dir = config_dir.resolve() if config_dir else None
    catalogue = open_catalogue(config_dir)
    problems = [p for text in overrides for p in _wrong(text, catalogue)]
    problems += _without_plugin(overrides)
    sweepers = [t for t in overrides if t.startswith("hydra/sweeper=") and _is_foreign(t)]
    if launcher_of(overrides) == "slurm" and sweepers:
        why = f"takes runs from eke's own sweeper only, and {sweepers[-1]} is one of Hydra's"
        problems.append(Problem("hydra/launcher", "slurm", why, "hydra/launcher=submitit_slurm"))
    if problems:
        raise ConfigError(problems)
    register()
    folder = ["--config-dir", str(config_dir)] if config_dir else []
    # Hydra knows neither `local` nor `eke`.
    foreign = [t for t in overrides if _is_foreign(t) or t.partition("=")[0] not in OWN]
    words = ["-m", *folder, *(as_hydra_takes_it(text, catalogue) for text in foreign)]
    main = hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")
    with _command_line(words):
        main(partial(_run_job, job, config_dir))()


def _run_job(job: Job, config_dir: Path | None, _config: Any) -> float | None:
    """One job; eke composes it again from its overrides, to have it typed and checked."""
    return job(tuple(HydraConfig.get().overrides.task), config_dir)


@contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """What Hydra is to read, with its errors raised instead of printed as a traceback."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _wrong(text: str, catalogue: Catalogue) -> list[Problem]:
    key, _, value = text.lstrip("+").partition("=")
    if key in ("sweep", *(k for k in catalogue.keys if k.startswith("sweep."))):
        why = "is for eke's own sweeper; Hydra's read what is typed, and hydra.sweeper.params"
        return [] if text == "sweep=none" else [Problem(key, shown(value), why, "KEY=VALUE,VALUE")]
    if key.startswith("hydra"):
        return []
    problems = find_problems(text, catalogue)
    try:
        varied = parse(text).is_sweep_override()
    except Exception:  # what kind, `problems` says
        return problems
    # Behind the last one's reason is that several values need -m, and here is -m.
    return problems[:-1] if varied and problems else problems


def _without_plugin(overrides: Sequence[str]) -> list[Problem]:
    """Launchers and sweepers that Hydra does not find; settings of one where none is chosen."""
    with hydra_state():
        loader = GlobalHydra.instance().config_loader()
        known = {group: loader.get_group_options(group) for group in OWN}
    problems = []
    for text in overrides:
        group, _, option = text.partition("=")
        if _is_foreign(text) and option not in known[group]:
            problems.append(_not_installed(group, option, known[group]))
        elif _is_setting(text):
            problems += _of_nothing(text, overrides)
    return problems


def _not_installed(group: str, option: str, known: Sequence[str]) -> Problem:
    package = PACKAGES[group].get(option)
    if package:
        return Problem(group, option, "is not installed", f"pip install {package}")
    own = OWN[group][0]
    options = [*OWN[group], *known, *PACKAGES[group]]
    why = f"there is none of this name: {', '.join(dict.fromkeys(options))}"
    return Problem(group, shown(option), why, f"{group}={closest(option, options) or own}")


def _of_nothing(text: str, overrides: Sequence[str]) -> list[Problem]:
    key, _, value = text.lstrip("+").partition("=")
    group = "hydra/" + key.split(".")[1]
    if any(_is_foreign(t) and t.startswith(f"{group}=") for t in overrides):
        return []
    name = group.partition("/")[2]
    if key == "hydra.sweeper.params" or key.startswith("hydra.sweeper.params."):
        fix = f"{multirun()} KEY=VALUE,VALUE"
        return [Problem(key, shown(value), "is read by Hydra's own sweepers only", fix)]
    why = f"is a setting of a {name} of Hydra's, and none is chosen"
    example = next(iter(PACKAGES[group]))
    return [Problem(key, shown(value), why, as_typed(f"{group}={example}", text))]
