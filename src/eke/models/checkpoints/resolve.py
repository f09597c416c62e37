"""Resolution of `model=pretrained` from its checkpoint.

Widths and depth of the tensors are compared with config.json before a job is queued. Every tensor
is compared when the model is loaded.
"""

import dataclasses
import json
import mmap
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_value, override
from eke.config.schema import Config, Mix, PretrainedModel, SequenceClassification, TextColumns
from eke.data.sources import files_digest
from eke.models.checkpoints import architecture
from eke.models.checkpoints.architecture import class_of, first_position
from eke.models.checkpoints.locate import CONFIG, KEY, LocalCheckpoint, locate, unusable
from eke.models.families import FAMILIES
from eke.models.families.family_record import Sizes
from eke.models.freezing import find_problem, is_frozen

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_Shapes = dict[str, tuple[int, ...]]

_TYPED = ("option", "family", "name_or_path", "revision", "dropout", "freeze")
"""Fields of `PretrainedModel` that are not read from the checkpoint."""

_OTHER = re.compile(r"position|\bwpe\b|\btransform\b|dense|(?<!\.weight)$").search
"""Names of tensors that are not embeddings but may have the same shape, including a quantizer's
buffers (I-BERT's `weight_integer`)."""


def resolve_model(config: Config, overrides: Sequence[str] = (), planning: bool = False) -> Config:
    """Fill in the sizes of a checkpoint. Other models stay unchanged.

    `planning` allows weights that are not on this machine. ConfigError if the checkpoint is
    unusable, or `overrides` set a size.
    """
    model = config.model
    if not isinstance(model, PretrainedModel):
        return config
    if problems := _typed_sizes(model, overrides):
        raise ConfigError(problems)
    found = locate(model.name_or_path, model.revision)
    raw = _read_config(found)
    _reject_foreign(found, raw)
    family, sizes = architecture.read_sizes(raw, found.typed)
    _reject_task(config, raw, family, found)
    shapes = _read_shapes(found)
    if not shapes and found.is_local:
        raise unusable(found.typed, "its files of weights hold no tensors")
    if not shapes:
        _reject_absent(found, family, planning)
    compare(family, sizes, shapes, found.typed)
    filled = dataclasses.replace(
        model,
        **{**_tied(found, raw, family, sizes, shapes), **_of_the_class(config, raw, sizes)},
        family=family,
        model_type=str(raw["model_type"]),
        name_or_path=str(found.folder) if found.is_local else found.typed,
        content=content_of(found),
        **(_counts(model, shapes) if family == "other" else {}),
    )
    return dataclasses.replace(config, model=filled)


def _counts(model: PretrainedModel, shapes: _Shapes) -> dict[str, Any]:
    """Return the sizes of an architecture without closed forms."""
    if problem := find_problem(model.freeze, {(n,): True for n in shapes}, "the checkpoint"):
        raise ConfigError(problem)
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    frozen = sum(size for name, size in sizes.items() if is_frozen(model.freeze, [name]))
    return {"num_parameters": sum(sizes.values()), "num_frozen_parameters": frozen or None}


def _of_the_class(config: Config, raw: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the supported attention kernels, router loss, labels and usable positions."""
    kind, task = str(raw["model_type"]), config.targets.option
    found: dict[str, Any] = {
        f"supports_{name}": architecture.supports(raw, task, name)
        for name in ("sdpa", "flash_attn", "flex_attn")
    }
    found["router_loss"] = architecture.asked_router_loss(config, raw)
    if _saved_by(raw).endswith("ForSequenceClassification"):
        found["label_names"] = _label_names(raw)
    if positions := sizes.get("max_position_embeddings"):
        pad = raw.get("pad_token_id")
        # All configuration classes with reserved rows of positions have this default.
        absolute = raw.get("position_embedding_type", "absolute") == "absolute"
        first = first_position(kind, pad if isinstance(pad, int) else 1) if absolute else 0
        found["max_position_embeddings"] = max(1, positions - first)
    return found


def _saved_by(raw: dict[str, Any]) -> str:
    """Return the class that wrote a config.json, "" if it is not named."""
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _label_names(raw: dict[str, Any]) -> list[str]:
    """Return the class names of a trained head by number, by default two."""
    named = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers' default
    if not isinstance(named, dict):
        return []
    by_number = {str(number): str(name) for number, name in named.items()}
    numbers = [str(n) for n in range(len(by_number))]
    return [by_number[n] for n in numbers] if set(numbers) == set(by_number) else []


def follow_head(config: Config) -> Config:
    """Set the number of classes from the checkpoint's head or from `task.labels`."""
    count = len(getattr(config.model, "label_names", []))
    count = count if count > 1 else len(getattr(config.task, "labels", []))
    if config.targets.problem.value == "regression":
        count = 1
    elif count < 2 or not isinstance(config.data, TextColumns | Mix):
        return config
    if not isinstance(config.task, SequenceClassification):
        return config
    return dataclasses.replace(config, task=dataclasses.replace(config.task, num_labels=count))


def _read_config(found: LocalCheckpoint) -> dict[str, Any]:
    """Read config.json; ConfigError if it is not an object or has no model_type."""
    try:
        raw = json.loads((found.folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise unusable(found.typed, f"its {CONFIG} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise unusable(found.typed, f"its {CONFIG} is not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise unusable(found.typed, f"its {CONFIG} has no model_type: it is not of transformers")
    return raw


def _typed_sizes(model: PretrainedModel, overrides: Sequence[str]) -> list[Problem]:
    """Return problems for sizes set by overrides or by the user's option file."""
    typed = {text.lstrip("+").partition("=")[0] for text in overrides}
    untouched, problems = PretrainedModel(name_or_path=model.name_or_path), []
    for name in (f.name for f in dataclasses.fields(model) if f.name not in _TYPED):
        key, value = f"model.{name}", getattr(model, name)
        if key not in typed and value == getattr(untouched, name):
            continue
        why = "is read from the checkpoint with model=pretrained and cannot be set"
        fix = Fix("model=pretrained", override(KEY, model.name_or_path), remark=f"without {key}")
        problems.append(Problem(key, format_value(value), why, fix, "pretrained"))
    return problems


def _reject_foreign(found: LocalCheckpoint, raw: dict[str, Any]) -> None:
    """Raise ConfigError for checkpoints without a class for text in transformers."""
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        why = f"its weights are quantized ({method or 'see config.json'}), and eke trains float32"
        raise unusable(found.typed, why, Fix(f"{KEY}=THE_UNQUANTIZED_MODEL"))
    kind = raw["model_type"]
    _reject_multimodal(found, raw)
    if architecture.is_known(kind) or any(class_of(kind, task) for task in architecture.MAPPINGS):
        return
    if raw.get("auto_map"):
        why = f"{kind} needs Python code from the checkpoint, which eke never runs"
        raise unusable(found.typed, why)
    why = f"its {CONFIG} says model_type = {kind}, and transformers {version('transformers')}"
    newer = f"pip install --upgrade transformers   (where a newer one has it; else {KEY}=ANOTHER)"
    raise unusable(found.typed, f"{why} has no class of it for a task of eke", Fix(remark=newer))


_PARTS = re.compile(r"(text|vision|image|audio|speech|thinker|language|llm)_config")
"""Keys of the parts of a multimodal model in config.json."""


def _reject_multimodal(found: LocalCheckpoint, raw: dict[str, Any]) -> None:
    """Raise ConfigError for a multimodal model, with code that saves its text part."""
    parts = {k: v for k, v in sorted(raw.items()) if _PARTS.fullmatch(k) and isinstance(v, dict)}
    if not parts:
        return
    why = f"is multimodal: its {CONFIG} has {' and '.join(parts)}, and eke trains text alone"
    kind = str(parts.get("text_config", {}).get("model_type"))
    if not class_of(kind, "causal_lm"):
        raise unusable(found.typed, why)
    code = (
        f"import transformers as t; f, to = {str(found.folder)!r}, 'NEW_FOLDER'; "
        "m = t.AutoModelForImageTextToText.from_pretrained(f); "
        "n = t.AutoModelForCausalLM.from_config(m.config.get_text_config()); "
        "n.base_model.load_state_dict(m.get_decoder().state_dict()); "
        "n.set_output_embeddings(m.get_output_embeddings()); "
        "n.save_pretrained(to); t.AutoTokenizer.from_pretrained(f).save_pretrained(to)"
    )
    remark = f"save its text part, a {kind}: {_pasted(code)}"
    raise unusable(found.typed, why, Fix(remark=remark))


def _pasted(code: str) -> str:
    return f"python -c {shlex.quote(code)}   then {KEY}=NEW_FOLDER"


_BY_ENDING = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForConditionalGeneration": "seq2seq_lm",
}
"""Suffix of an architecture's name -> task it was saved for."""


def _reject_task(config: Config, raw: dict[str, Any], family: str, found: LocalCheckpoint) -> None:
    """Raise ConfigError if the saved class is for another task. Known families have a rule."""
    if FAMILIES[family].is_known or not config.targets.per_token:
        return
    name = _saved_by(raw)
    task = next((t for ending, t in _BY_ENDING.items() if name.endswith(ending)), None)
    if task and not class_of(str(raw["model_type"]), task):  # Whisper reads sound
        raise unusable(found.typed, f"was saved by {name}, which is for none of eke's tasks")
    if task is None or task == config.targets.option:
        return
    why, fix = f"the checkpoint was saved by {name}", Fix(f"task={task}")
    raise ConfigError(Problem("task", config.targets.option, why, fix, "task_needs_other_model"))


def _reject_absent(found: LocalCheckpoint, family: str, planning: bool) -> None:
    """Raise ConfigError if a Hub model needs weights that are not on this machine."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not planning:
        why = "its weights are not in the hub's cache, and HF_HUB_OFFLINE is set"
        fix = Fix(remark=f"hf download {found.typed}   (with a connection)")
        raise unusable(found.typed, why, fix)
    if not FAMILIES[family].is_known:
        why = "eke learns the size of this architecture from its weights, which are not here yet"
        raise unusable(found.typed, why, Fix(remark=f"hf download {found.typed}"))


def _tied(
    found: LocalCheckpoint, raw: dict[str, Any], family: str, sizes: Sizes, shapes: _Shapes
) -> Sizes:
    """Return sizes with `tie_word_embeddings` by the tensors, since the flag may be wrong."""
    # transformers 5 ties T5 unless the checkpoint has a projection.
    two_stacks = FAMILIES[family].is_encoder_decoder
    if two_stacks and shapes and "lm_head.weight" not in shapes:
        return {**sizes, "tie_word_embeddings": True}
    if raw.get("is_encoder_decoder") is True or two_stacks:
        return sizes
    table = (sizes["vocab_size"], sizes["hidden_size"])
    tables = [name for name, shape in shapes.items() if shape == table and not _OTHER(name)]
    if len(tables) == 2:
        return {**sizes, "tie_word_embeddings": _tensors_equal(found, *tables)}
    if len(tables) == 1 and _saved_by(raw).endswith(tuple(_BY_ENDING)):
        return {**sizes, "tie_word_embeddings": True}
    return sizes


def weight_files(found: LocalCheckpoint) -> list[Path]:
    """Return the files with the weights, [] for a Hub model without them on this machine.

    ConfigError if a local folder lacks one or has another format.
    """
    folder = found.folder
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        return _shards(found)
    if not found.is_local:
        return []
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        why = f"has its weights in {pickled[0]}, which can run code when it is loaded"
        raise unusable(found.typed, why, Fix(remark=f"convert it once: {_conversion(found)}"))
    raise unusable(found.typed, f"has a config.json, but no {_WEIGHTS}")


def _conversion(found: LocalCheckpoint) -> str:
    code = (
        "from transformers import AutoConfig; import transformers as t; "
        f"f = {str(found.folder)!r}; c = AutoConfig.from_pretrained(f); "
        "getattr(t, c.architectures[0]).from_pretrained(f).save_pretrained('NEW_FOLDER')"
    )
    return _pasted(code)


def _shards(found: LocalCheckpoint) -> list[Path]:
    try:
        index = json.loads((found.folder / _INDEX).read_text())
        names = sorted(set(index["weight_map"].values()))
        paths = [found.folder / name for name in names]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise unusable(found.typed, f"its {_INDEX} cannot be read: {error}") from error
    absent = [path.name for path in paths if not path.is_file()]
    if absent and not found.is_local:
        return []  # the worker downloads the missing files
    if absent:
        why = f"{len(absent)} of its {len(paths)} files of weights are missing: {absent[0]}"
        raise unusable(found.typed, why)
    return paths


def _read_shapes(found: LocalCheckpoint) -> _Shapes:
    """Return the shape of every tensor by name, {} without weights; ConfigError: damaged file."""
    from safetensors import SafetensorError, safe_open

    shapes: _Shapes = {}
    for path in weight_files(found):
        try:
            with safe_open(path, "np") as file:
                names = file.keys()
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except OSError as error:
            raise unusable(found.typed, f"its {path.name} cannot be read: {error}") from error
        except SafetensorError as error:
            with open(path, "rb") as opened:
                is_pointer = opened.read(7) == b"version"
            if is_pointer:
                why = f"its {path.name} is a Git LFS pointer, not the weights"
                fix = Fix(remark="git lfs pull   (in its folder)")
                raise unusable(found.typed, why, fix) from error
            size = path.stat().st_size
            why = f"its {path.name} ({size} bytes) is no safetensors file, or was not copied whole"
            raise unusable(found.typed, f"{why}: {error}") from error
    return shapes


def _tensors_equal(found: LocalCheckpoint, one: str, other: str) -> bool:
    tensors = {}  # format: https://huggingface.co/docs/safetensors/index#format
    for path in weight_files(found):
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8:start]))
        for name in {one, other} & header.keys():
            low, high = header[name]["data_offsets"]
            tensors[name] = header[name]["dtype"], content[start + low : start + high]
    return tensors[one] == tensors[other]


def compare(family: str, sizes: Sizes, shapes: _Shapes, typed: str) -> None:
    """Raise ConfigError for the first size in config.json that differs from the tensors."""
    if not FAMILIES[family].is_known:
        return
    # transformers fails to build these models.
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    groups = sizes.get("num_key_value_heads") or heads
    if width % heads and "gated" not in sizes:  # only T5 has heads of any width
        why = f"its config.json has num_attention_heads = {heads}, no divisor of hidden_size"
        raise unusable(typed, f"{why} = {width}")
    if heads % groups:
        why = f"its config.json has num_key_value_heads = {groups}, no divisor of"
        raise unusable(typed, f"{why} num_attention_heads = {heads}")
    difference = next(_differences(family, sizes, shapes), None) if shapes else None
    if difference:
        why = "its config.json says {} = {}, and its tensors {}".format(*difference)
        raise unusable(typed, why, Fix(remark="the config.json that was saved with these weights"))


def _differences(family: str, sizes: Sizes, shapes: _Shapes) -> Iterator[tuple[str, object, str]]:
    names = FAMILIES[family]
    ending = names.embedding_tensor
    embedding = _shape_of_ending(shapes, ending)
    if embedding is None or len(embedding) != 2:
        yield "model_type", family, f"have no matrix {ending}"
        return
    width, rows = sizes["hidden_size"], sizes["vocab_size"]
    if embedding[-1] != width:
        yield "hidden_size", width, f"are {embedding[-1]} wide"
    if embedding[0] != rows:
        yield "vocab_size", rows, f"have {embedding[0]} embeddings"
    numbers = [int(m[1]) for name in shapes if (m := re.search(names.layer_tensor, name))]
    depth = 1 + max(numbers, default=-1)
    if depth != sizes["num_hidden_layers"]:
        yield "num_hidden_layers", sizes["num_hidden_layers"], f"are of {depth} layers"
    inner = _shape_of_ending(shapes, names.inner_tensor) if names.inner_tensor else None
    if inner is not None and inner != (sizes["intermediate_size"], width):
        yield "intermediate_size", sizes["intermediate_size"], f"are of {inner[0]}"


def _shape_of_ending(shapes: _Shapes, ending: str) -> tuple[int, ...] | None:
    return next((shape for name, shape in shapes.items() if name.endswith(ending)), None)


def content_of(found: LocalCheckpoint) -> str:
    """Return `NAME@COMMIT` of a Hub model, or 16 hex digits over a folder's files."""
    if not found.is_local:
        return f"{found.typed}@{found.commit}"
    files = [found.folder / CONFIG, *weight_files(found)]
    try:
        return files_digest((path.name, path) for path in files)[:16]
    except OSError as error:
        why = f"its {error.filename} cannot be read: {error.strerror}"
        raise unusable(found.typed, why) from error
