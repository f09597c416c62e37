"""Loading of a checkpoint into the class of the task, with a report of mismatches."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors import SafetensorError
from torch import nn

from eke.common.errors import RunError
from eke.common.text import first_line, format_number
from eke.config.schema import PretrainedModel
from eke.data.preparation.untrusted import LoadError, load, reading
from eke.data.sources import Vocabulary
from eke.models.families import family_of
from eke.models.sizes import is_ragged
from eke.plan.planner import Plan
from eke.training.distributed.parts import Parts
from eke.training.model.adapters import ADAPTER_CONFIG, freeze_named, trained_modules
from eke.training.model.attention_kernels import ATTENTION
from eke.training.model.dropout import set_dropout
from eke.training.model.model_checks import (
    HEADS,
    check_positions,
    drawn_in_float32,
    freeze_unreached,
    padding_side,
    preserve_rng_state,
)
from eke.training.model.number_formats import base_dtype, frozen_dtype, trained_dtype

_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|position_ids|masked_bias|attn\.bias)$")
# Old checkpoints store buffers that newer classes compute. GPT-2's attn.bias was its causal mask.

_HEADS = ("classification_head", "classifier", "cls", "lm_head", "qa_outputs", "score")
# T5's classes have encoder and decoder beside the head, without a submodel.


@dataclass(frozen=True)
class LoadReport:
    """Mismatches between a checkpoint and the model."""

    new_weights: tuple[str, ...] = ()
    """Tensors missing from the checkpoint, drawn from the run's seed: the task's head."""
    resized_weights: tuple[str, ...] = ()
    """Tensors drawn from the seed because the checkpoint's head has another number of classes."""
    unused_weights: tuple[str, ...] = ()
    """Tensors only in the checkpoint: another task's head."""
    unreached: tuple[str, ...] = ()
    """Parameters without effect on any output, which are frozen."""
    notes: tuple[str, ...] = ()
    padding: str = "right"
    """Side on which rows can be padded. Empty if padding changes the other tokens."""

    @property
    def warnings(self) -> list[str]:
        """Sentences for log and record."""
        named = {
            "initialized at random, missing from the checkpoint": self.new_weights,
            "initialized at random, other size in the checkpoint": self.resized_weights,
            "skipped, part of another head of the checkpoint": self.unused_weights,
        }
        found = [
            f"{why}: {format_number(len(names), 'tensor')}, {_listed(names)}"
            for why, names in named.items()
            if names
        ]
        if self.unreached:
            found.append(f"not trained, no effect on any output: {_listed(self.unreached)}")
        found += self.notes
        if not self.padding:
            found.append(
                "padding changes the outputs of other tokens: losses depend "
                "on which rows share a micro-batch (batch.per_device=1 batch.eval_per_device=1)"
            )
        return found


def load_pretrained(
    plan: Plan, device: torch.device, parts: Parts | None = None
) -> tuple[nn.Module, LoadReport]:
    """Load the planned checkpoint in the planned format on `device`, with the head of the task.

    Missing tensors of the head are drawn from the run's seed. On the meta device only sizes are
    read. With `parts` this rank's rows are read, and the model is on the meta device. Raises
    RunError: The checkpoint has no such head, does not match its config.json, differs between
    ranks, or the model does not support the task.
    """
    import transformers

    config = plan.config
    head = getattr(transformers, HEADS[plan.targets.option])
    pretrained = cast(PretrainedModel, config.model)
    dtype = base_dtype(plan)
    settings = {"dtype": dtype, "attn_implementation": ATTENTION[config.attention.option]}
    try:
        model_config = checkpoint_configuration(plan)
        stored = model_config.dtype
        random, formats = preserve_rng_state(device, config.seed), _own_formats(plan)
        cut = parts.read() if parts else nullcontext()
        with reading(pretrained), random, drawn_in_float32(dtype), formats, _skip_base_model(), cut:
            if device.type == "meta":
                with device:
                    return head.from_config(model_config, **settings), LoadReport()
            model, info = load(
                head,
                pretrained.name_or_path,
                revision=_commit_of(pretrained),
                config=model_config,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below
                device_map={"": device} if device.type == "cuda" else None,
                **settings,
            )
    except LoadError as raised:  # an invalid config.json may raise any class of error
        error = raised.__cause__
        found = _explained(pretrained, error)
        raise found from (None if found is error else error)
    report = replace(_judge(plan, model, info), notes=_notes(plan, pretrained, stored))
    if parts:
        parts.adopt(model)
    with parts or nullcontext():
        freeze_named(plan, model)  # before the checks, which run modules in both formats
    if not family_of(config).is_known:
        computing = parts.computing(model) if parts else nullcontext()
        frozen = frozen_dtype(plan)
        mixed = frozen is not trained_dtype(plan)
        with torch.autocast(device.type, frozen, enabled=mixed), computing:
            check_positions(model, plan.targets.option)
            report = replace(report, unreached=freeze_unreached(model))
            if is_ragged(config) and max(plan.batch.per_device, plan.batch.eval_per_device) > 1:
                side = padding_side(model, plan.targets.option, plan.vocabulary.pad)
                report = replace(report, padding=side)
    return cast(nn.Module, model), report


def _notes(plan: Plan, pretrained: PretrainedModel, stored: torch.dtype | None) -> tuple[str, ...]:
    """Return warnings about files or weights of a checkpoint that are not used unchanged."""
    notes, frozen = [], frozen_dtype(plan)
    if (Path(pretrained.name_or_path) / ADAPTER_CONFIG).is_file():
        notes.append(f"the checkpoint's {ADAPTER_CONFIG} is ignored: its weights are a full model")
    if frozen is not trained_dtype(plan) and stored not in (None, frozen):
        before, after = (str(dtype).removeprefix("torch.") for dtype in (stored, frozen))
        why = f"frozen weights of the checkpoint are rounded from {before} to {after}"
        instead = "precision=fp32" if plan.config.model.freeze else "peft.base_weights=float32"
        notes.append(f"{why} ({instead} keeps them)")
    return tuple(notes)


def _explained(pretrained: PretrainedModel, error: BaseException | None) -> BaseException:
    """Return a library's error itself, or an error that names the checkpoint."""
    assert error is not None, "a LoadError has a cause"
    if isinstance(error, RunError):
        return RunError(f"model.name_or_path = {pretrained.name_or_path}: {error}")
    of_disk = isinstance(error, OSError) and error.errno
    if of_disk or isinstance(error, RuntimeError | MemoryError):
        return error  # lack of memory, a bug or a disk error, not caused by transformers
    known = isinstance(error, OSError | ValueError | ImportError | SafetensorError)
    why = first_line(error).rstrip(".:") if known else f"{type(error).__name__}: {error}"
    return _unusable(pretrained, why, "another checkpoint, or another task")


@contextmanager
def _skip_base_model() -> Iterator[None]:
    """Prevent transformers from loading the base model of an adapter."""
    from transformers.integrations import peft
    from transformers.models.auto import auto_factory

    name, none = "find_adapter_config_file", lambda *_, **__: None
    with patch.object(peft, name, none), patch.object(auto_factory, name, none):
        yield


def _own_formats(plan: Plan) -> AbstractContextManager[Any]:
    """Return a context that loads or draws trained and frozen weights in their own formats."""
    from transformers import PreTrainedModel

    # transformers 5.23 reads each tensor in its format in the model without data. Other versions
    # use one format for all (tests/equivalence/test_frozen_weights.py).
    ask: Any = getattr(PreTrainedModel, "_get_dtype_plan", None)
    if ask is None or frozen_dtype(plan) is trained_dtype(plan):
        return nullcontext()

    def prepare(model: Any, dtype: torch.dtype) -> Any:
        freeze_named(plan, model)
        heads = [] if plan.config.model.freeze else trained_modules(plan, model)
        for name in heads:
            model.get_submodule(name).to(trained_dtype(plan))
        return ask(model, dtype)

    return patch.object(PreTrainedModel, "_get_dtype_plan", prepare)


def _commit_of(model: PretrainedModel) -> str:
    """Return the commit of the plan, or transformers' default for a local folder."""
    return model.content.partition("@")[2] or "main"


def checkpoint_configuration(plan: Plan) -> Any:
    """Return the checkpoint's configuration, adjusted for training and task, or raise RunError."""
    from transformers import AutoConfig

    model = cast(PretrainedModel, plan.config.model)
    try:
        loaded = load(AutoConfig, model.name_or_path, revision=_commit_of(model))
    except LoadError as error:
        why = f"unusable config.json: {error.why}"
        raise _unusable(model, why, "another checkpoint") from error
    loaded.use_cache = False
    targets = plan.targets
    if targets.per_token and not targets.has_target:
        loaded.tie_word_embeddings = model.tie_word_embeddings  # as in the tensors
    if not targets.per_token:
        if loaded.num_labels != targets.num_labels:
            loaded.num_labels = targets.num_labels
        loaded.problem_type = targets.problem.full_name
        # Decoders locate the padding, T5 the end of text, by the ids used in the rows.
        loaded.pad_token_id, loaded.eos_token_id = plan.vocabulary.pad, plan.vocabulary.eos
    if model.dropout is not None:
        set_dropout(loaded, model.dropout)
    return loaded


def _judge(plan: Plan, model: Any, info: Any) -> LoadReport:
    """Return the differences in the head. RunError: other tensors or the size differ."""
    pretrained = cast(PretrainedModel, plan.config.model)
    needed = "a config.json that belongs to the weights"
    mismatched = {name: sizes for name, *sizes in sorted(info["mismatched_keys"])}
    unexpected = sorted(n for n in info["unexpected_keys"] if not _BUFFERS.search(n))
    strange, missing, extra = (
        [name for name in names if not _is_head(model, name)]
        for names in (mismatched, sorted(info["missing_keys"]), unexpected)
    )
    # Only the head may be new: other missing tensors would silently be random.
    count, kind, why = sum(p.numel() for p in model.parameters()), type(model).__name__, ""
    if strange:
        found, wanted = mismatched[strange[0]]
        why = (
            f"its config.json does not match its tensors: {len(strange)} have other sizes, "
            f"{strange[0]} is {list(found)} instead of {list(wanted)}"
        )
    elif missing:
        needed = "a complete checkpoint"
        why = (
            f"it lacks {format_number(len(missing), 'tensor')} of {kind}: "
            f"{_listed(missing)}. The checkpoint is incomplete or of another architecture"
        )
    elif extra:
        why = (
            f"{len(extra)} of its tensors do not belong to {kind} with its "
            f"config.json: {_listed(extra)}"
        )
    elif family_of(plan.config).is_known and count != plan.size.num_parameters:
        why = (
            f"has {count} parameters, its config.json gives {plan.size.num_parameters}: a "
            "setting (tie_word_embeddings?) does not match its tensors"
        )
    if why:
        raise _unusable(pretrained, why, needed)
    new = sorted({*info["missing_keys"]} - set(mismatched))
    return LoadReport(tuple(new), tuple(mismatched), tuple(unexpected))


def _is_head(model: Any, name: str) -> bool:
    """Return whether a tensor is outside the model shared by all tasks. Poolers are outside."""
    prefix = model.base_model_prefix
    base = getattr(model, prefix, model)
    parts = name.removeprefix(f"{prefix}.").split(".")
    if parts[0] == "pooler":
        return True
    children = {child for child, _ in base.named_children()}
    children |= {parameter.partition(".")[0] for parameter, _ in base.named_parameters()}
    return parts[0] not in children - set(_HEADS)


def _unusable(pretrained: PretrainedModel, why: str, instead: str) -> RunError:
    return RunError(f"model.name_or_path = {pretrained.name_or_path}: {why} -> {instead}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def set_special_ids(model_config: Any, plan: Plan) -> None:
    """Set ids of padding (read by decoders), begin and end of text, except for bytes."""
    vocabulary = plan.vocabulary
    if vocabulary.is_bytes:
        return
    # Only a classifier needs a padding id that is also the end of text.
    no_pad = vocabulary.pad_is_eos and plan.targets.per_token
    model_config.pad_token_id = None if no_pad else vocabulary.pad
    model_config.bos_token_id = vocabulary.bos
    model_config.eos_token_id = vocabulary.eos
    if model_config.is_encoder_decoder:
        model_config.pad_token_id = model_config.decoder_start_token_id = vocabulary.pad


def is_padding_alone(vocabulary: Vocabulary, token: int) -> bool:
    """Return whether a token is used only for padding."""
    frames = (vocabulary.frame, vocabulary.target_frame)
    written = {t for frame in frames for t in (*frame.prefix, *frame.suffix)}
    return token == vocabulary.pad and token not in {vocabulary.bos, vocabulary.eos, *written}


def train_padding_embedding(plan: Plan, model: Any) -> None:
    """Train the embedding of the padding token if samples contain that token."""
    if plan.vocabulary.is_bytes:
        return
    table = getattr(model.get_input_embeddings(), "weight", None)  # None for Perceiver
    # `nn.Embedding` gives the row of its `padding_idx` no gradient.
    for module in model.modules():
        index = getattr(module, "padding_idx", None)
        is_table = isinstance(module, nn.Embedding) and module.weight is table
        if is_table and index is not None and not is_padding_alone(plan.vocabulary, index):
            module.padding_idx = None
