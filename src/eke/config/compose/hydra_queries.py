"""Hydra's own questions, answered by Hydra: `--cfg job`, `--info`, `--hydra-help` and the like."""

import contextlib
import io
import sys
from collections.abc import Sequence

import hydra

from eke.common.errors import ConfigError, Problem
from eke.common.paths import conf_folder
from eke.config.compose.arguments import INFO_VALUES, Arguments
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.compose_cache import as_hydra_takes_it
from eke.config.compose.formatting import as_typed, closest, shown
from eke.config.compose.shell_completion import COMPLETION_FLAGS
from eke.config.compose.suggest import nearest_key
from eke.config.schema import register

_LONG = {"-c": "--cfg", "-p": "--package", "-i": "--info"}
_VALUES = {"--cfg": ("job", "hydra", "all"), "--info": INFO_VALUES}

QUESTIONS = ("--cfg", "--info", "--hydra-help")
"""Flags that ask for something to be printed."""

COMPANIONS = ("--resolve", "--package")
"""Flags that say more about `--cfg`."""


def is_completion(arguments: Arguments) -> bool:
    """Whether a shell asks; eke answers that itself (see `shells`)."""
    return any(flag in arguments.hydra_flags for flag in COMPLETION_FLAGS)


def check_question(arguments: Arguments) -> None:
    """Whether it is one question, with a value that Hydra knows.

    Raises:
        ConfigError: what Hydra would answer with a traceback or its parser's usage; a flag that
            would change what is run behind eke's back, or that asks nothing.
    """
    pairs = _pairs(arguments.hydra_flags)
    problems = [problem for flag, value in pairs for problem in _wrong_flag(flag, value)]
    questions = [pair for pair in pairs if pair[0] in QUESTIONS]
    if not problems:
        problems = _wrong_together(pairs, questions, arguments)
    if problems:
        raise ConfigError(problems)


def _pairs(flags: Sequence[str]) -> list[tuple[str, str]]:
    """Each flag, in its long form, with its value."""
    pairs: list[tuple[str, str]] = []
    for token in flags:
        if token.startswith("-"):
            pairs.append((_LONG.get(token, token), ""))
        else:
            pairs[-1] = (pairs[-1][0], token)
    return pairs


def _wrong_flag(flag: str, value: str) -> list[Problem]:
    if flag not in QUESTIONS + COMPANIONS:
        why = "would run something else than eke checks; your own options go into a folder"
        return [Problem(flag, value, why, "--config-dir FOLDER")]
    if flag == "--package" and not value:
        return [Problem(flag, "", "names a part of the configuration", "--package optimizer")]
    known = _VALUES.get(flag, (value,))
    if value in known or (flag == "--info" and not value):
        return []
    why = f"can be {', '.join(known)}"
    fix = [flag, closest(value, known) or known[0], *([value] if "=" in value else [])]
    return [Problem(flag, shown(value), why, as_typed(*fix))]


def _wrong_together(
    pairs: list[tuple[str, str]], questions: list[tuple[str, str]], arguments: Arguments
) -> list[Problem]:
    companions = [pair for pair in pairs if pair[0] in COMPANIONS]
    about = next((pair for pair in questions if pair[0] == "--cfg"), ("--cfg", "job"))
    if companions and about not in questions:
        flag, value = companions[0]
        fix = " ".join([*about, *(as_typed(word) for word in (flag, value) if word)])
        return [Problem(flag, value, "goes with --cfg", fix)]
    if len(questions) > 1:
        first, second = (" ".join(pair).strip() for pair in questions[:2])
        return [Problem(second, "", f"one question at a time; {first} is one, too", second)]
    if arguments.multirun and questions[0][0] != "--hydra-help":
        why = "is about one configuration, and -m spans several; plan_only=true lists those"
        fix = as_typed("-m", *dict.fromkeys([*arguments.overrides, "plan_only=true"]))
        return [Problem(questions[0][0], questions[0][1], why, fix)]
    return []


def run_hydra_flags(arguments: Arguments) -> str:
    """Hydra's answer to a question that `check_question` found right.

    Raises:
        ConfigError: there is no such package, or whatever else Hydra ends with.
    """
    register()
    folder = ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []
    before = sys.argv
    # A bare --info would swallow the first override.
    pairs = [(f, v or "all") if f == "--info" else (f, v) for f, v in _pairs(arguments.hydra_flags)]
    flags = [word for pair in pairs for word in pair if word]
    catalogue = make_catalogue(arguments.config_dir)
    overrides = [as_hydra_takes_it(text, catalogue) for text in arguments.overrides]
    sys.argv = [before[0], *flags, *folder, *overrides]
    answer, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(complaint):
            hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(
                lambda config: None
            )()
    except SystemExit as ended:
        if ended.code:
            raise ConfigError(_refused(arguments, complaint.getvalue())) from ended
    finally:
        sys.argv = before
    sys.stderr.write(complaint.getvalue())
    return answer.getvalue().removesuffix("\n")


def _refused(arguments: Arguments, complaint: str) -> Problem:
    """Hydra's last line, and for an absent package the one that was probably meant."""
    pairs = dict(_pairs(arguments.hydra_flags))
    asked, package = pairs.get("--cfg", ""), pairs.get("--package", "")
    if f"package '{package}' not found" not in complaint:
        lines = complaint.strip().splitlines() or ["Hydra gives no answer"]
        return Problem(" ".join(arguments.hydra_flags), "", lines[-1])
    why = f"there is no such part of the configuration that --cfg {asked} prints"
    return Problem("--package", shown(package), why, _where(asked, package, arguments))


def _where(asked: str, package: str, arguments: Arguments) -> str:
    """The question whose answer has the package, or the nearest there is."""
    section = package.partition(".")[0]
    if section == "hydra":
        return f"--cfg hydra --package {'hydra' if asked == 'hydra' else package}"
    asked = "job" if asked == "hydra" else asked
    catalogue = make_catalogue(arguments.config_dir)
    if section in catalogue.sections and package in catalogue.keys:  # another option's key
        return f"--cfg {asked} --package {section}"
    near = nearest_key(package, catalogue) or ""
    known = near in catalogue.sections or near in catalogue.keys
    return f"--cfg {asked} --package {near if known else 'optimizer'}"
