"""Comparison of a worker's input files and software with the plan.

All other inputs are in the plan (option files, DeepSpeed's JSON) or in the store of prepared
tokens, whose digest is checked when it is opened (`eke.training.batches.tasks`).
"""

from dataclasses import replace

from eke.common.errors import ChangedError, EkeError, format_os_error
from eke.config.schema import Config, PretrainedModel, PythonSource, SequenceClassification, Text
from eke.data.sources import BYTES, fingerprint, open_corpus, tokenizer_content, tokenizer_of
from eke.hardware import software_now
from eke.models.checkpoints import content_of, locate
from eke.plan.identity import changed_fingerprint
from eke.plan.planner.plan import Plan, plans_of_sources

DATA, TOKENIZER, MODEL = "data.path", "data.tokenizer", "model.name_or_path"


def inputs_of(config: Config, data_fingerprint: str) -> dict[str, str]:
    """Return the hash of each of the user's files that a worker reads, by key path."""
    found: dict[str, str] = {}
    if isinstance(config.data, PythonSource | Text):
        if tokenizer_of(config.data) == BYTES:
            found[DATA] = data_fingerprint
        elif isinstance(config.task, SequenceClassification):  # folder sizes order the classes
            found[DATA] = _read(config, DATA)
    if content := _read(config, TOKENIZER):
        found[TOKENIZER] = content
    # The content of Hub models is their commit.
    if isinstance(config.model, PretrainedModel) and "@" not in config.model.content:
        found[MODEL] = config.model.content
    return found


def check_inputs(plan: Plan) -> None:
    """Raise ChangedError if an input is missing or its content has changed."""
    for key in plan.inputs:
        if why := change_of(plan, key):
            raise ChangedError(_changed(plan.config, key, why))
    for source in plans_of_sources(plan):
        check_inputs(source)


def change_of(plan: Plan, key: str) -> str:
    """Return the change of an input since planning, "" without a change or input."""
    if key not in plan.inputs:
        return ""
    try:
        return "" if _read(plan.config, key) == plan.inputs[key] else "its content has changed"
    except EkeError as error:
        return error.short()
    except OSError as error:
        return format_os_error(error)


def _read(config: Config, key: str) -> str:
    """Return the current hash of an input, "" without one."""
    if key == TOKENIZER:
        return tokenizer_content(tokenizer_of(config.data))
    if key == MODEL and isinstance(config.model, PretrainedModel):
        return content_of(locate(config.model.name_or_path, None))
    corpus = open_corpus(config)
    return "" if corpus is None else fingerprint(corpus)


def _changed(config: Config, key: str, why: str) -> str:
    group, _, name = key.partition(".")
    if value := getattr(getattr(config, group), name, ""):
        return f"{key} = {value}: {why} since the run was planned -> repeat the command"
    return (
        f"data = {config.data.option}: the standard library differs from the plan "
        "-> repeat the command with the Python that trains, or data=text"
    )


def with_own_software(plan: Plan) -> Plan:
    """Return the plan with the software that is on disk now."""
    device = {key: plan.machine[key] for key in plan.machine if key.startswith("device")}
    return replace(plan, machine={**device, **software_now()})


def software_changes(plan: Plan) -> list[str]:
    """Format the differences between the software on disk and in the plan."""
    return changed_fingerprint(plan.machine, with_own_software(plan).machine)


def check_software(plan: Plan) -> None:
    """Raise ChangedError if the software on disk differs from the plan."""
    if changes := "; ".join(software_changes(plan)):
        why = f"the software has changed since the run was planned ({changes})"
        raise ChangedError(f"{why} -> repeat the command")
