"""`model=pretrained` with everything that its checkpoint says filled in."""

import dataclasses
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from math import prod
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_value
from eke.config.schema import Config, PretrainedModel, Rows, SequenceClassification
from eke.models.checkpoints.agreement import Shapes, compare, content_of, read_shapes, same_numbers
from eke.models.checkpoints.architecture import (
    first_position,
    is_known,
    models_folder,
    read_sizes,
    supports,
)
from eke.models.checkpoints.locate import CONFIG, KEY, Located, locate, refuse
from eke.models.families import FAMILIES
from eke.models.families.family_record import Sizes

TYPED = ("option", "family", "name_or_path", "revision", "dropout")
"""Fields of `PretrainedModel` that are not the checkpoint's to say."""

_OTHER = re.compile(r"position|\bwpe\b|\btransform\b|dense|(?<!\.weight)$").search
"""Names of tensors that may be as large as a table of the vocabulary, and are none; a quantizer's
buffers (I-BERT's `weight_integer`) among them."""

LISTS = ("auto_mappings.py", "configuration_auto.py")
"""Where transformers 5 names the architectures it has, below `models/auto`."""


def resolve_model(config: Config, overrides: Sequence[str] = (), planning: bool = False) -> Config:
    """The configuration with the sizes of its checkpoint; any other model is left as it is.

    Args:
        config: as composed; not changed.
        overrides: of the command line; a size among them is rejected.
        planning: only a plan is wanted, so the weights need not be on this machine.

    Raises:
        ConfigError: there is no checkpoint, it is damaged, or eke cannot train it.
    """
    model = config.model
    if not isinstance(model, PretrainedModel):
        return config
    problems = _typed_sizes(model, overrides)
    if problems:
        raise ConfigError(problems)
    found = locate(model.name_or_path, model.revision)
    raw = read_config(found)
    _refuse_foreign(found, raw)
    family, sizes = read_sizes(raw, found.typed)
    _refuse_task(config, raw, family)
    shapes = read_shapes(found)
    if not shapes and found.is_local:
        raise refuse(found.typed, "its files of weights hold no tensors")
    if not shapes:
        _refuse_absent(found, family, planning)
    compare(family, sizes, shapes, found.typed)
    filled = dataclasses.replace(
        model,
        **{**_tied(found, raw, family, sizes, shapes), **_of_the_class(config, raw, sizes)},
        family=family,
        model_type=str(raw["model_type"]),
        name_or_path=str(found.folder) if found.is_local else found.typed,
        content=content_of(found),
        num_parameters=sum(map(prod, shapes.values())) if family == "other" else None,
    )
    return dataclasses.replace(config, model=filled)


def _of_the_class(config: Config, raw: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """What the class of the model says: attention that it has, and positions that it can use."""
    kind, task = str(raw["model_type"]), config.task.option
    found: dict[str, Any] = {
        f"supports_{name}": supports(raw, task, name)
        for name in ("sdpa", "flash_attn", "flex_attn")
    }
    names = raw.get("architectures")
    if isinstance(names, list) and names and str(names[0]).endswith("ForSequenceClassification"):
        found["label_names"] = _label_names(raw)
    if positions := sizes.get("max_position_embeddings"):
        pad = raw.get("pad_token_id")
        # The default of all configuration classes whose table of positions begins behind it.
        absolute = raw.get("position_embedding_type", "absolute") == "absolute"
        first = first_position(kind, pad if isinstance(pad, int) else 1) if absolute else 0
        found["max_position_embeddings"] = max(1, positions - first)
    return found


def _label_names(raw: dict[str, Any]) -> list[str]:
    """Of the classes of a trained head, by number; two where config.json names none."""
    named = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers' default
    if not isinstance(named, dict):
        return []
    by_number = {str(number): str(name) for number, name in named.items()}
    numbers = [str(n) for n in range(len(by_number))]
    return [by_number[n] for n in numbers] if set(numbers) == set(by_number) else []


def follow_head(config: Config) -> Config:
    """The configuration with as many classes as the checkpoint's head has, for rows of data."""
    names = getattr(config.model, "label_names", [])
    if len(names) < 2 or not isinstance(config.task, SequenceClassification):
        return config
    if not isinstance(config.data, Rows):
        return config
    return dataclasses.replace(config, task=dataclasses.replace(config.task, num_labels=len(names)))


def read_config(found: Located) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        ConfigError: it is no JSON object, or does not name its architecture.
    """
    try:
        raw = json.loads((found.folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(found.typed, f"its {CONFIG} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refuse(found.typed, f"its {CONFIG} is not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise refuse(found.typed, f"its {CONFIG} has no model_type: it is not of transformers")
    return raw


def _typed_sizes(model: PretrainedModel, overrides: Sequence[str]) -> list[Problem]:
    """Sizes set by overrides or by the user's option file."""
    names = [f.name for f in dataclasses.fields(model) if f.name not in TYPED]
    typed = {text.lstrip("+").partition("=")[0] for text in overrides}
    defaults = PretrainedModel(name_or_path=model.name_or_path)
    wrong = [
        name
        for name in names
        if f"model.{name}" in typed or getattr(model, name) != getattr(defaults, name)
    ]
    why = "is read from the checkpoint with model=pretrained and cannot be set"
    chosen = ("model=pretrained", f"{KEY}={model.name_or_path}")
    fixes = {name: Fix(*chosen, remark=f"without model.{name}") for name in wrong}
    return [
        Problem(f"model.{name}", format_value(getattr(model, name)), why, fix, "pretrained")
        for name, fix in fixes.items()
    ]


def _refuse_foreign(found: Located, raw: dict[str, Any]) -> None:
    """What is no plain model of transformers."""
    quantized = raw.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        why = f"its weights are quantized ({method or 'see config.json'}), and eke trains float32"
        raise refuse(found.typed, why, Fix(f"{KEY}=THE_UNQUANTIZED_MODEL"))
    kind = raw["model_type"]
    if is_known(kind) or _transformers_has(kind):
        return
    if raw.get("auto_map"):
        why = f"{kind} needs Python code from the checkpoint, which eke never runs"
        raise refuse(found.typed, why)
    why = f"its {CONFIG} says model_type = {kind}, which transformers {version('transformers')}"
    newer = f"pip install --upgrade transformers   (where a newer one has it; else {KEY}=ANOTHER)"
    raise refuse(found.typed, f"{why} does not have", Fix(remark=newer))


def _transformers_has(model_type: str) -> bool:
    """Whether transformers' own list names the architecture, without importing it.

    The list is read as text: importing it would import torch. Where it cannot be found, loading the
    model will tell.
    """
    folder = models_folder()
    lists = [folder / "auto" / name for name in LISTS] if folder else []
    texts = [path.read_text(encoding="utf-8") for path in lists if path.is_file()]
    return not texts or any(f'"{model_type}"' in text for text in texts)


_BY_ENDING = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForConditionalGeneration": "seq2seq_lm",
}
"""End of an architecture's name -> the task it was saved for."""


def _refuse_task(config: Config, raw: dict[str, Any], family: str) -> None:
    """A task that the saved class shows to be another one's; known families have a rule for it."""
    if FAMILIES[family].is_known or isinstance(config.task, SequenceClassification):
        return
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    task = next((t for ending, t in _BY_ENDING.items() if name.endswith(ending)), None)
    if task is None or task == config.task.option:
        return
    why = f"the checkpoint was saved by {name}"
    raise ConfigError(
        Problem("task", config.task.option, why, Fix(f"task={task}"), "task_needs_other_model")
    )


def _refuse_absent(found: Located, family: str, planning: bool) -> None:
    """A hub model of which only config.json is here."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not planning:
        why = "its weights are not in the hub's cache, and HF_HUB_OFFLINE is set"
        fix = Fix(remark=f"hf download {found.typed}   (with a connection)")
        raise refuse(found.typed, why, fix)
    if not FAMILIES[family].is_known:
        why = "eke learns the size of this architecture from its weights, which are not here yet"
        raise refuse(found.typed, why, Fix(remark=f"hf download {found.typed}"))


def _tied(found: Located, raw: dict[str, Any], family: str, sizes: Sizes, shapes: Shapes) -> Sizes:
    """Whether the output shares the embedding's tensor, as the file has it; its flag may be untrue.

    transformers 5 ties T5's always, unless the checkpoint has a projection. Other models of two
    stacks have several tables, which tell nothing.
    """
    two_stacks = FAMILIES[family].is_encoder_decoder
    if two_stacks and shapes and "lm_head.weight" not in shapes:
        return {**sizes, "tie_word_embeddings": True}
    if raw.get("is_encoder_decoder") is True or two_stacks:
        return sizes
    table = (sizes["vocab_size"], sizes["hidden_size"])
    tables = [name for name, shape in shapes.items() if shape == table and not _OTHER(name)]
    if len(tables) == 2:
        return {**sizes, "tie_word_embeddings": same_numbers(found, *tables)}
    names = raw.get("architectures")
    saved_by = str(names[0]) if isinstance(names, list) and names else ""
    if len(tables) == 1 and saved_by.endswith(tuple(_BY_ENDING)):
        return {**sizes, "tie_word_embeddings": True}
    return sizes
