"""Own code of a configuration: found, stored and examined before the run is planned."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import user_path
from eke.config.parts import own_parts
from eke.config.schema import Config, CustomData, CustomModel
from eke.data.sources import files_digest
from eke.estimate.memory import examine_own_code
from eke.plan.own_code import Code, find_code, store_code


def resolve_own_code(
    config: Config, config_dir: Path | None, frozen: tuple[Code, Path] | None = None
) -> tuple[Config, Code | None]:
    """Return the configuration with the facts about own code filled in, and the code.

    `frozen` is the code of a finished run, and its folder. ConfigError: The code is missing, raises
    an exception, or does not fit its arguments.
    """
    code, run = frozen or (find_code(own_parts(config), config.code.path, config_dir), None)
    if code is None:
        return config, None
    store_code(code, run)
    files = _content_of_files(config)
    found = examine_own_code(config, code, files)
    problems = [each.problem() for each in found.problems]
    if found.failure:
        remark = "code that is imported must not compute, read or write much"
        first = own_parts(config)[0]
        why, fix = f"{found.failure}, before a run could be planned", Fix(remark=remark)
        problems.append(Problem(f"{first.key}.target", first.target, why, fix, "own_error"))
    if problems:
        raise ConfigError(problems)
    if isinstance(config.model, CustomModel):
        counted = sum(_product(shape) for shape in found.shapes)
        filled = replace(
            config.model,
            shapes=found.shapes,
            num_parameters=counted,
            num_hidden_layers=found.num_layers,
            flops_per_sample=found.flops_per_sample,
        )
        config = replace(config, model=filled)
    if isinstance(config.data, CustomData):
        filled_data = replace(
            config.data,
            content=f"{files} {found.samples}",
            train_length=found.train_length,
            eval_length=found.eval_length,
        )
        config = replace(config, data=filled_data)
    return config, code


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _content_of_files(config: Config) -> str:
    """Return a hash of `data.files`, and of each argument that is an existing file or folder."""
    named = getattr(config.data, "files", [])
    texts = [*named, *(t for part in own_parts(config) for t in _texts(part.args))]
    texts += _texts(getattr(config.data, "eval_args", {}))
    places = {text: user_path(text) for text in texts if text}
    if missing := [text for text in named if not places[text].exists()]:
        why = f"does not exist: {', '.join(missing)}"
        raise ConfigError(Problem("data.files", ",".join(named), why, id="missing_file"))
    files = [
        (f"{text} {file.relative_to(place)}", file)
        for text, place in sorted(places.items())
        for file in ([place] if place.is_file() else sorted(place.rglob("*")))
        if file.is_file()
    ]
    return files_digest(files)[:16] if files else "none"


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in nested arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
