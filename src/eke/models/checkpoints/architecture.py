"""From a checkpoint's config.json to the sizes of `PretrainedModel`.

Architectures whose tensors `eke.models.sizes` knows are read under their own names and defaults; of
any other one the usual names are looked for, and what is not found stays unknown.

Facts of transformers' model classes, read from their source: an import would import torch.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eke.config.schema.fields import LARGEST
from eke.config.schema.model import MAX_LAYERS
from eke.models.checkpoints.locate import refuse

Raw = Mapping[str, Any]
Sizes = dict[str, Any]

SYNONYMS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "num_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_encoder_position_embeddings",  # LED
    ),
}
"""Key of eke -> its names in transformers' configurations, the usual one first."""

_DEPTHS = ("num_hidden_layers", "num_decoder_layers")

MAIN = tuple(SYNONYMS)[:5]
"""Without these a model of a known family has no size."""


class Reader:
    """Values of one config.json, each checked as it is read."""

    def __init__(self, raw: Raw, typed: str) -> None:
        self.raw, self.typed = raw, typed

    def count(self, key: str, default: int | None = None) -> int | None:
        """A positive whole number under any of the key's names; null and absence are the default.

        Raises:
            ConfigError: something else is there.
        """
        for name in SYNONYMS.get(key, (key,)):
            value = self.raw.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                why = f"in its config.json {name} is {value!r}, which is no positive whole number"
                raise refuse(self.typed, why)
            if value > (MAX_LAYERS if key in _DEPTHS else LARGEST):
                raise refuse(self.typed, f"in its config.json {name} is {value}, beyond any model")
            return value
        return default

    def needed(self, key: str) -> int:
        """A number without which nothing can be computed.

        Raises:
            ConfigError: it is not there.
        """
        found = self.count(key)
        if found is None:
            names = " or ".join(SYNONYMS.get(key, (key,)))
            why = f"its config.json has no {names}, which eke's plans are made from"
            raise refuse(self.typed, why)
        return found

    def flag(self, key: str, default: bool) -> bool:
        """A truth value.

        Raises:
            ConfigError: something else is there.
        """
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise refuse(self.typed, f"in its config.json {key} is {value!r}, not true or false")
        return value

    def main(self) -> Sizes:
        """The five sizes that every architecture has."""
        return {key: self.needed(key) for key in MAIN}


def read_sizes(raw: Raw, typed: str) -> tuple[str, Sizes]:
    """Family and sizes.

    Args:
        raw: the content of config.json.
        typed: folder or name, for messages.

    Returns:
        A key of `eke.models.sizes.FAMILIES`, and fields of `PretrainedModel`.

    Raises:
        ConfigError: a size is missing or is no number.
    """
    reader = Reader(raw, typed)
    family, read = KNOWN.get(str(raw.get("model_type")), ("other", _other))
    if family != "other" and not _is_plain(raw):
        family, read = "other", _other
    return family, read(reader)


# Switches that add or remove tensors which the closed forms of eke.models.sizes do not have.
_UNUSUAL = ("attention_bias", "mlp_bias", "add_cross_attention", "is_decoder")


def _is_plain(raw: Raw) -> bool:
    return not any(raw.get(key) is True for key in _UNUSUAL)


def _decoder(key_value_heads: int | None, positions: int) -> Callable[[Reader], Sizes]:
    """Llama's relatives, with the defaults of transformers' own configuration class."""

    def read(reader: Reader) -> Sizes:
        return {
            **reader.main(),
            "num_key_value_heads": reader.count("num_key_value_heads", key_value_heads),
            "head_dim": reader.count("head_dim"),
            "max_position_embeddings": reader.count("max_position_embeddings", positions),
            "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        }

    return read


def _qwen3(reader: Reader) -> Sizes:
    sizes = _decoder(32, 32768)(reader)
    return {**sizes, "head_dim": sizes["head_dim"] or 128}


def _mixtral(reader: Reader) -> Sizes:
    return {
        **_decoder(8, 131072)(reader),
        "num_local_experts": reader.count("num_local_experts", 8),
        "num_experts_per_tok": reader.count("num_experts_per_tok", 2),
    }


def _bert(reader: Reader) -> Sizes:
    return {
        **reader.main(),
        "max_position_embeddings": reader.count("max_position_embeddings", 512),
        "type_vocab_size": reader.count("type_vocab_size", 2),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
    }


def _gpt2(reader: Reader) -> Sizes:
    sizes: Sizes = {key: reader.needed(key) for key in MAIN if key != "intermediate_size"}
    inner = reader.count("n_inner", 4 * sizes["hidden_size"])
    return {
        **sizes,
        "intermediate_size": inner,
        "max_position_embeddings": reader.count("max_position_embeddings", 1024),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
    }


def _t5(reader: Reader) -> Sizes:
    return {
        **reader.main(),
        "head_dim": reader.count("d_kv", 64),
        "num_decoder_layers": reader.count("num_decoder_layers"),
        "gated": str(reader.raw.get("feed_forward_proj") or "relu").startswith("gated"),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
    }


def _other(reader: Reader) -> Sizes:
    """What the usual names give; attention stays unknown where it would be guessed."""
    sizes: Sizes = {key: reader.needed(key) for key in ("hidden_size", "vocab_size")}
    # Experts that a token may not pass through, and two stacks, have no usual names.
    unusual = reader.raw.get("is_encoder_decoder") is True or any("expert" in k for k in reader.raw)
    if not unusual:
        sizes["num_hidden_layers"] = reader.count("num_hidden_layers", 0)
        sizes["num_attention_heads"] = reader.count("num_attention_heads", 0)
        sizes["head_dim"] = reader.count("head_dim")
    return {
        **sizes,
        "intermediate_size": reader.count("intermediate_size", 0),
        "max_position_embeddings": reader.count("max_position_embeddings"),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
    }


KNOWN: dict[str, tuple[str, Callable[[Reader], Sizes]]] = {
    "llama": ("llama", _decoder(None, 2048)),
    "mistral": ("llama", _decoder(8, 131072)),
    "qwen2": ("qwen2", _decoder(32, 32768)),
    "qwen3": ("qwen3", _qwen3),
    "mixtral": ("mixtral", _mixtral),
    "bert": ("bert", _bert),
    "gpt2": ("gpt2", _gpt2),
    "t5": ("t5", _t5),
}
"""`model_type` -> family of `eke.models.sizes`, and how its config.json is read. Defaults are
those of the configuration classes of transformers 5 (tested)."""


MAPPINGS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
"""`task.option` -> table of `models/auto/modeling_auto.py`: model type -> class."""

ROOT_CLASS = "PreTrainedModel"
"""transformers' base of all models; it supports nothing by itself."""


@cache
def models_folder() -> Path | None:
    """Transformers' folder `models`; None where it is not installed."""
    spec = find_spec("transformers")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places)), "models") if places else None


@cache
def _tree(path: Path) -> ast.Module:
    """Raises OSError: there is no such file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _table(path: Path, name: str) -> dict[str, str]:
    """A literal `NAME = OrderedDict([(key, value), ...])`; of several values the first."""
    found: dict[str, str] = {}
    for node in _tree(path).body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != name:
            continue
        for pair in ast.walk(node.value):
            if isinstance(pair, ast.Tuple) and len(pair.elts) == 2:
                key, value = pair.elts
                value = value.elts[0] if isinstance(value, ast.Tuple) else value
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    found.setdefault(str(key.value), str(value.value))
    return found


def source_of(model_type: str) -> Path | None:
    """The file with the classes of a model type; None where transformers has none of its name."""
    folder = models_folder()
    if folder is None:
        return None
    try:
        special = _table(folder / "auto/auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    except OSError:
        special = {}
    module = special.get(model_type, model_type.replace("-", "_"))
    found = sorted((folder / module).glob("modeling_*.py"))
    whole = [path for path in found if path.stem == f"modeling_{model_type.replace('-', '_')}"]
    return next(iter([*whole, *found]), None)


def class_attribute(model_type: str, task: str, name: str) -> bool | None:
    """A flag of the class of a task: `_supports_sdpa`; None where its source does not tell.

    Args:
        model_type: of config.json.
        task: option of the group `task`.
        name: of the attribute.
    """
    folder = models_folder()
    if folder is None:
        return None
    try:
        heads = _table(folder / "auto/modeling_auto.py", MAPPINGS[task])
        head = heads.get(model_type)
        # gpt-sw3 and internlm3 have no source: their class is that of GPT-2 and of Llama.
        kinds = [model_type, *(kind for kind in heads if heads[kind] == head)]
        source = next(filter(None, map(source_of, kinds)), None)
        return _attribute(source, head, name) if head and source else None
    except (OSError, SyntaxError):
        return None


def _attribute(path: Path, class_name: str, name: str) -> bool | None:
    """A class attribute that is True or False in the source, by the order of its bases."""
    if class_name == ROOT_CLASS:
        return False
    definition = next(
        (n for n in _tree(path).body if isinstance(n, ast.ClassDef) and n.name == class_name), None
    )
    if definition is None:
        place = next(_imported_from(path, class_name), None)
        return None if place is None else _attribute(place, class_name, name)
    for node in definition.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        if isinstance(target, ast.Name) and target.id == name:
            value = node.value  # type: ignore[attr-defined]  # both kinds of assignment have one
            return bool(value.value) if isinstance(value, ast.Constant) else None
    bases = [base.id for base in definition.bases if isinstance(base, ast.Name)]
    answers = [answer for base in bases if (answer := _attribute(path, base, name)) is not None]
    return next(iter(answers), None)


def _imported_from(path: Path, class_name: str) -> Iterator[Path]:
    """Files of transformers' models that a name was imported from."""
    for node in _tree(path).body:
        if isinstance(node, ast.ImportFrom) and any(n.name == class_name for n in node.names):
            parts = (node.module or "").split(".")
            place = path.parents[node.level - 1].joinpath(*parts).with_suffix(".py")
            if node.level and place.is_file():
                yield place


_PADDED_TABLE = re.compile(
    r"position_embeddings = [\w.]+\(\s*config\.max_position_embeddings,[^()]*padding_idx="
    r"|super\(\)\.__init__\(config\.max_position_embeddings,[^()]*pad_token_id\)"
)
_READ_AHEAD = re.compile(r"self\.position_embeddings\.\w+\([^()]*\+ 1\)")


def first_position(model_type: str, pad: int) -> int:
    """Row of the table of positions that a sequence begins with.

    RoBERTa's relatives keep the rows up to the padding token's id for padding, which shows in their
    table's `padding_idx`; all others begin with the first. A row that ProphetNet's decoder reads
    ahead of each token's own is one that no sequence can have.

    Args:
        model_type: of config.json.
        pad: `pad_token_id` of config.json.
    """
    source = source_of(model_type)
    try:
        text = source.read_text(encoding="utf-8") if source else ""
    except OSError:
        return 0
    return (pad + 1) * bool(_PADDED_TABLE.search(text)) + bool(_READ_AHEAD.search(text))


def supports(raw: Mapping[str, Any], task: str, name: str) -> bool | None:
    """Whether the class of a config.json has `name`, an attention: of two parts, both."""
    flag = f"_supports_{name}"
    found = [class_attribute(str(raw["model_type"]), task, flag)]
    for part in (raw.get("encoder"), raw.get("decoder")):
        if isinstance(part, Mapping):
            kind = str(part.get("model_type"))
            known = (class_attribute(kind, each, flag) for each in MAPPINGS)
            found.append(next((answer for answer in known if answer is not None), None))
    return False if False in found else (None if None in found else True)
