"""The files that a worker reads, held against what was planned: the record names their content.

Everything else that was typed is in the plan: own option files, DeepSpeed's JSON. Rows and tokens
are read from the store, whose digest is checked when it is opened (`eke.build.sources`).
"""

from collections.abc import Callable

from eke.corpus import BYTES, fingerprint, open_corpus, tokenizer_content, tokenizer_of
from eke.errors import ChangedError, EkeError, of_system
from eke.plan.plan import Plan
from eke.pretrained import content_of, locate
from eke.schema import Config, PretrainedModel, PythonSource, SequenceClassification, Text

DATA, TOKENIZER, MODEL = "data.path", "data.tokenizer", "model.name_or_path"

AGAIN = "the same command again"
"""It is planned with the content as it is then, and is another run."""


def inputs_of(config: Config, data_fingerprint: str) -> dict[str, str]:
    """What a worker will read from the user's files.

    Args:
        config: with its model resolved.
        data_fingerprint: hash of the data's content, as counted.

    Returns:
        Key path -> hash of the content; hub models are named by their commit and not among them.
    """
    found: dict[str, str] = {}
    data = config.data
    if _reads_text(config):
        is_bytes = tokenizer_of(data) == BYTES
        found[DATA] = data_fingerprint if is_bytes else _read(config, DATA)
    if content := _read(config, TOKENIZER):
        found[TOKENIZER] = content
    model = config.model
    if isinstance(model, PretrainedModel) and "@" not in model.content:
        found[MODEL] = model.content
    return found


def check_inputs(plan: Plan) -> None:
    """Hold what is there now against the plan; hashes are cached by size and times of change.

    Raises:
        ChangedError: the content of an input is another one, or it is gone.
    """
    for key, planned in plan.inputs.items():
        try:
            why = "" if _read(plan.config, key) == planned else "its content has changed"
        except EkeError as error:
            why = error.short()
        except OSError as error:
            why = of_system(error)
        if why:
            raise ChangedError(_changed(plan.config, key, why))


def _reads_text(config: Config) -> bool:
    """Bytes are read from the files, and the sizes of a text's folders number its classes."""
    if not isinstance(config.data, PythonSource | Text):
        return False
    is_bytes = tokenizer_of(config.data) == BYTES
    return is_bytes or isinstance(config.task, SequenceClassification)


def _read(config: Config, key: str) -> str:
    """The hash of an input as it is now; empty where there is none."""
    return _READ[key](config)


def _text(config: Config) -> str:
    corpus = open_corpus(config)
    assert corpus is not None, "its key is there for text alone"
    return fingerprint(corpus)


def _tokenizer(config: Config) -> str:
    return tokenizer_content(tokenizer_of(config.data))


def _model(config: Config) -> str:
    assert isinstance(config.model, PretrainedModel), "its key is there for checkpoints alone"
    return content_of(locate(config.model.name_or_path, None))


_READ: dict[str, Callable[[Config], str]] = {DATA: _text, TOKENIZER: _tokenizer, MODEL: _model}


def _changed(config: Config, key: str, why: str) -> str:
    """One sentence, with what helps."""
    group, _, name = key.partition(".")
    value = getattr(getattr(config, group), name, None)
    if value is not None:
        return f"{key} = {value}: {why} since the run was planned -> {AGAIN}"
    return (
        f"data = {config.data.option}: the standard library of this Python is not the one that was "
        f"planned -> {AGAIN}, with the Python that trains (or data=text data.path=FOLDER)"
    )
