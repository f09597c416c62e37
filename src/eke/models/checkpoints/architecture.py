"""Sizes in a checkpoint's config.json, and facts in the source of transformers' model classes.

Known families have readers with the names and defaults of their architecture. For others the common
names are read, and missing sizes stay unknown. Classes are read as source, since their import would
import torch. A run also checks the built model (`eke.training.model.model_checks`).
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eke.common.errors import Fix
from eke.config.schema import Config, PretrainedModel
from eke.models.checkpoints.locate import unusable
from eke.models.families import FAMILIES, family_of
from eke.models.families.family_record import SYNONYMS, InvalidSize, Reader, Sizes

_Raw = Mapping[str, Any]


def read_sizes(raw: _Raw, typed: str) -> tuple[str, Sizes]:
    """Return the key of `FAMILIES` and fields of `PretrainedModel`; ConfigError: invalid size."""
    kind, family = str(raw.get("model_type")), "other"
    read: Callable[[Reader], Sizes] = _read_common_sizes
    if is_known(kind) and not any(raw.get(key) is True for key in _UNUSUAL):
        known = next(each for each in FAMILIES.values() if kind in each.checkpoints)
        family, read = known.name, known.checkpoints[kind]
    try:
        return family, read(Reader(raw))
    except InvalidSize as error:
        raise unusable(typed, str(error)) from error


def is_known(model_type: str) -> bool:
    """Return whether a family reads checkpoints of this type."""
    return any(model_type in family.checkpoints for family in FAMILIES.values())


# Switches for tensors that the closed forms of eke.models.families do not include.
_UNUSUAL = ("attention_bias", "mlp_bias", "add_cross_attention", "is_decoder")


def _read_common_sizes(reader: Reader) -> Sizes:
    """Read sizes by their common names. Ambiguous sizes of attention stay unknown."""
    # Sizes that are lists by layer also stay unknown (Gemma 3n's `intermediate_size`).
    needed = SYNONYMS["hidden_size"]
    raw = {k: v for k, v in reader.raw.items() if k in needed or not isinstance(v, list)}
    reader = Reader(raw)
    sizes: Sizes = {key: reader.needed(key) for key in ("hidden_size", "vocab_size")}
    # Inactive experts and two stacks have no common names.
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


MAPPINGS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
"""`task.option` -> table in `models/auto/modeling_auto.py` of model type -> class."""


@cache
def models_folder() -> Path:
    """Return transformers' folder `models`."""
    spec = find_spec("transformers")
    assert spec is not None, "transformers is a dependency of eke"
    assert spec.origin is not None, "it is a package of files"
    return Path(spec.origin).parent / "models"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _table(path: Path, name: str) -> dict[str, str]:
    """Read a literal `NAME = OrderedDict([(key, value), ...])`, of a tuple the first value."""
    for node in _tree(path).body:
        match node:
            case ast.Assign([ast.Name(id=found)], ast.Call(args=[literal])) if found == name:
                pairs = ast.literal_eval(literal)
                return {k: v[0] if isinstance(v, tuple) else v for k, v in pairs}
    return {}


def class_of(model_type: str, task: str) -> str:
    """Return transformers' class of a model type with a task's head, "" without one."""
    return _table(models_folder() / "auto/modeling_auto.py", MAPPINGS[task]).get(model_type, "")


def _source_of(model_type: str) -> Path | None:
    """Return the file with the classes of a model type, None if there is no file of its name."""
    folder = models_folder()
    try:
        special = _table(folder / "auto/auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    except OSError:
        special = {}
    module = special.get(model_type, model_type.replace("-", "_"))
    found = sorted((folder / module).glob("modeling_*.py"))
    whole = [path for path in found if path.stem == f"modeling_{model_type.replace('-', '_')}"]
    return next(iter([*whole, *found]), None)


def _in_class(model_type: str, task: str, name: str, root: ast.AST | None = None) -> ast.AST | None:
    """Return `_member` of the class of a task, None without source."""
    folder = models_folder()
    try:
        heads = _table(folder / "auto/modeling_auto.py", MAPPINGS[task])
        head = heads.get(model_type)
        # gpt-sw3 and internlm3 have no source: they use the classes of GPT-2 and Llama.
        kinds = [model_type, *(kind for kind in heads if heads[kind] == head)]
        source = next(filter(None, map(_source_of, kinds)), None)
        return _member(source, head, name, root) if head and source else None
    except (OSError, SyntaxError):  # missing, or not Python of this version
        return None


def class_attribute(model_type: str, task: str, name: str) -> bool | None:
    """Return a flag of the class of a task (`_supports_sdpa`), None if the source has none."""
    value = _in_class(model_type, task, name, ast.Constant(False))
    return bool(value.value) if isinstance(value, ast.Constant) else None


def can_pack(config: Config) -> bool:
    """Return whether restarted positions separate the samples of a row."""
    model, family = config.model, family_of(config)
    if family.is_known or not isinstance(model, PretrainedModel):
        return family.is_decoder
    return keeps_samples_apart(model.model_type)


def logits_change(config: Config) -> str | None:
    """Return `change_of_logits` of the configuration's model."""
    model = config.model
    if family_of(config).is_known or not isinstance(model, PretrainedModel):
        return ""
    return change_of_logits(model.model_type, config.targets.option)


@cache
def change_of_logits(model_type: str, task: str) -> str | None:
    """Return the change of a class's logits after the projection, None if the source is unclear.

    "" is no change, "/ NAME" or "* NAME" a scale, "cap NAME" a cap with tanh (Gemma 2). NAME is an
    attribute of the model.
    """
    forward = _in_class(model_type, task, "forward")
    if forward is None:
        return None
    nodes = list(ast.walk(forward))
    given = [k.value for call in nodes if isinstance(call, ast.Call) for k in call.keywords
             if k.arg == "logits"]  # fmt: skip
    names = {value.id for value in given if isinstance(value, ast.Name)}
    stated = [n for n in nodes if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    made = [each.value for each in stated if names & _assigned(each)]
    if not made or not _is_call_of_self(made[0]):
        return None
    text = ";".join(ast.unparse(value) for value in made[1:] if value is not None)
    name = r"self\.([\w.]+)"
    if capped := re.fullmatch(rf"logits / {name};torch\.tanh\(logits\);logits \* self\.\1", text):
        return f"cap {capped[1]}"
    scaled = re.fullmatch(rf"logits ([*/]) {name}", text)
    return " ".join(scaled.groups()) if scaled else None if text else ""


@cache
def _source(model_type: str, task: str, method: str) -> str:
    """Return the source of a method of a class, "" without one."""
    found = _in_class(model_type, task, method)
    return "" if found is None else ast.unparse(found)


def adds_router_loss(model_type: str, task: str) -> bool:
    """Return whether a class computes an `aux_loss` and adds it to the loss."""
    return "_coef * aux_loss" in _source(model_type, task, "forward")


def asked_router_loss(config: Config, raw: _Raw) -> float | None:
    """Return the coefficient of the router loss that transformers adds with a config.json.

    ConfigError if it has no coefficient, or the class does not return the loss (NLLB-MoE).
    """
    kind, task = str(raw["model_type"]), config.targets.option
    # The class of Switch Transformers has an argument instead of a key in the configuration.
    reads = "config.output_router_logits" in _source(kind, task, "forward")
    if raw.get("output_router_logits") is not True or not reads:
        return None
    named = re.search(r"aux_loss_coef = config\.([\w.]+)", _source(kind, task, "__init__"))
    value: Any = raw
    for name in named[1].split(".") if named else ():  # DBRX: ffn_config.moe_loss_weight
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, int | float) and adds_router_loss(kind, task):
        return float(value)
    if config.task.router_loss != "auto":
        return None
    why = f"config.json asks for a router loss, which cannot be trained with this {kind}"
    raise unusable("auto", why, Fix("task.router_loss=off"), "task.router_loss")


def router_loss(config: Config) -> float | None:
    """Return the coefficient of the trained router loss, None without one."""
    typed = config.task.router_loss
    if typed == "auto":
        return getattr(config.model, "router_loss", None) or None
    kind = getattr(config.model, "model_type", family_of(config).name)
    with suppress(ValueError):  # `off`, or a value that a rule rejects
        if float(typed) > 0 and adds_router_loss(kind, config.targets.option):
            return float(typed)
    return None


def _assigned(statement: ast.AST) -> set[str]:
    named = [part for part in ast.walk(statement) if isinstance(part, ast.Name)]
    return {part.id for part in named if isinstance(part.ctx, ast.Store)}


def _is_call_of_self(value: ast.AST | None) -> bool:
    """Return whether a value is `self.lm_head(...)`, possibly with `.float()` or similar."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    inner = value.func.value
    if isinstance(inner, ast.Call):
        return not value.args and _is_call_of_self(inner)
    return ast.unparse(inner).split(".")[0] == "self"


@cache
def keeps_samples_apart(model_type: str) -> bool:
    """Return whether a decoder's source makes its mask from restarted positions."""
    source = _source_of(model_type)
    try:
        functions = ast.walk(_tree(source)) if source else []
        return any(_masks_by_position(f) for f in functions if isinstance(f, ast.FunctionDef))
    except (OSError, SyntaxError):
        return False


def _masks_by_position(function: ast.FunctionDef) -> bool:
    """Return whether a function passes `position_ids` to transformers' causal masks."""
    nodes = list(ast.walk(function))
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    given: list[set[Any]] = [{k.arg for k in n.keywords} for n in nodes if isinstance(n, ast.Call)]
    given += [{k.value for k in n.keys if isinstance(k, ast.Constant)}
              for n in nodes if isinstance(n, ast.Dict)]  # fmt: skip
    # Functions for masks have an argument `config`, layers do not.
    mask = {"config", "attention_mask", "position_ids"}
    return "create_causal_mask" in named and any(mask <= each for each in given)


def _member(path: Path, class_name: str, name: str, root: ast.AST | None = None) -> ast.AST | None:
    """Return a method or an attribute's value by base order, `root` if no base has it."""
    if class_name == "PreTrainedModel":
        return root
    classes = (node for node in _tree(path).body if isinstance(node, ast.ClassDef))
    definition = next((node for node in classes if node.name == class_name), None)
    if definition is None:
        place = next(_imported_from(path, class_name), None)
        return None if place is None else _member(place, class_name, name, root)
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
            return node.value
    bases = [base.id for base in definition.bases if isinstance(base, ast.Name)]
    inherited = (_member(path, base, name, root) for base in bases)
    return next((found for found in inherited if found is not None), None)


def _imported_from(path: Path, class_name: str) -> Iterator[Path]:
    """Yield the files of transformers' models from which a file imports a class."""
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


def first_position(model_type: str, pad: int) -> int:
    """Return the first row of the position table that a sequence uses."""
    # RoBERTa and derived models reserve the rows up to the padding token's id (`padding_idx` of the
    # table). All others begin with row 0.
    source = _source_of(model_type)
    try:
        text = source.read_text(encoding="utf-8") if source else ""
    except OSError:
        return 0
    return (pad + 1) * bool(_PADDED_TABLE.search(text))


def supports(raw: Mapping[str, Any], task: str, name: str) -> bool | None:
    """Return whether the class of a config.json, and both its parts, support an attention."""
    flag = f"_supports_{name}"
    found = [class_attribute(str(raw["model_type"]), task, flag)]
    for part in (raw.get("encoder"), raw.get("decoder")):
        if isinstance(part, Mapping):
            kind = str(part.get("model_type"))
            known = (class_attribute(kind, each, flag) for each in MAPPINGS)
            found.append(next((answer for answer in known if answer is not None), None))
    return False if False in found else (None if None in found else True)
