"""Loading of a checkpoint into the class of the task, with a report of mismatches.

transformers is imported inside the functions: naming a builder must not cost its import.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors import SafetensorError
from torch import nn

from eke.common.errors import RunError
from eke.common.text import first_line, format_number
from eke.config.schema import PretrainedModel, SequenceClassification
from eke.data.preparation.untrusted import LoadError, load, reading
from eke.data.sources import Vocabulary
from eke.models.families import family_of
from eke.models.sizes import is_ragged
from eke.plan.planner import Plan
from eke.training.distributed.parts import Parts
from eke.training.model.adapters import ADAPTER_CONFIG, freeze_named, trained_modules
from eke.training.model.attention_kernels import ATTENTION
from eke.training.model.number_formats import base_dtype, frozen_dtype, trained_dtype
from eke.training.model.unused import (
    HEADS,
    check_places,
    drawn_in_float32,
    freeze_unreached,
    own_random_numbers,
    padding_side,
    set_dropout,
)

_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|position_ids|masked_bias|attn\.bias)$")
# Old checkpoints hold what newer classes compute; GPT-2's attn.bias was its causal mask.

_HEADS = ("classification_head", "classifier", "cls", "lm_head", "qa_outputs", "score")
# T5's classes have encoder and decoder at the level of the head, not in a submodel.


@dataclass(frozen=True)
class LoadReport:
    """Mismatches between a checkpoint and the model."""

    new_weights: tuple[str, ...] = ()
    """Initialised at random from the run's seed: the task's head."""
    resized_weights: tuple[str, ...] = ()
    """Also initialised at random: the checkpoint's head has another number of classes."""
    unused_weights: tuple[str, ...] = ()
    """Only in the checkpoint: another task's head."""
    unreached: tuple[str, ...] = ()
    """Frozen, since no output depends on them."""
    notes: tuple[str, ...] = ()
    """Further warnings."""
    padding: str = "right"
    """Side on which rows can be padded; empty where padding changes the other tokens."""

    @property
    def warnings(self) -> list[str]:
        """Sentences for log and record."""
        named = {
            "random at the start, since the checkpoint lacks them": self.new_weights,
            "random at the start, since the checkpoint's have another size": self.resized_weights,
            "skipped, since they belong to another head of the checkpoint": self.unused_weights,
        }
        found = [
            f"{why}: {format_number(len(names), 'tensor')}, {_listed(names)}"
            for why, names in named.items()
            if names
        ]
        if self.unreached:
            found.append(f"no output depends on {_listed(self.unreached)}: not trained")
        found += self.notes
        if not self.padding:
            found.append(
                "padding changes what this model computes for other tokens: losses depend "
                "on which rows share a micro-batch (batch.per_device=1 batch.eval_per_device=1)"
            )
        return found


def load_pretrained(
    plan: Plan, device: torch.device, parts: Parts | None = None
) -> tuple[nn.Module, LoadReport]:
    """The planned checkpoint in the planned format on `device`, with the head of the task.

    What it lacks of the head is drawn from the run's seed. On the meta device only sizes are read.
    With `parts` this rank's rows are read, and the model itself is on the meta device.
    Forward passes over a few tokens show what of another family's model is of use.
    Raises RunError: it has no such head, does not do what the task asks for, or its tensors are not
    those of its config.json, or ranks have other files.
    """
    import transformers

    config = plan.config
    head = getattr(transformers, HEADS[config.task.option])
    pretrained = cast(PretrainedModel, config.model)
    dtype = base_dtype(plan)
    settings = {"dtype": dtype, "attn_implementation": ATTENTION[config.attention.option]}
    try:
        model_config = checkpoint_configuration(plan)
        stored = model_config.dtype
        random, formats = own_random_numbers(device, config.seed), _own_formats(plan)
        cut = parts.read() if parts else nullcontext()
        with reading(pretrained), random, drawn_in_float32(dtype), formats, _alone(), cut:
            if device.type == "meta":
                with device:
                    return head.from_config(model_config, **settings), LoadReport()
            model, info = load(
                head,
                pretrained.name_or_path,
                revision=commit_of(pretrained),
                config=model_config,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below
                device_map={"": device} if device.type == "cuda" else None,
                **settings,
            )
    except LoadError as raised:  # a config.json's odd value may end in any error of any class
        error = raised.__cause__
        found = _explained(pretrained, error)
        raise found from (None if found is error else error)
    report = replace(_judge(plan, model, info), notes=_notes(plan, pretrained, stored))
    if parts:
        parts.adopt(model)
    with parts or nullcontext():
        freeze_named(plan, model)  # so that both formats meet where modules expect it
    if not family_of(config).is_known:
        computing = parts.computing(model) if parts else nullcontext()
        frozen = frozen_dtype(plan)
        mixed = frozen is not trained_dtype(plan)
        with torch.autocast(device.type, frozen, enabled=mixed), computing:
            check_places(model, config.task.option)
            report = replace(report, unreached=freeze_unreached(model))
            if is_ragged(config) and max(plan.batch.per_device, plan.batch.eval_per_device) > 1:
                side = padding_side(model, config.task.option, plan.vocabulary.pad)
                report = replace(report, padding=side)
    return cast(nn.Module, model), report


def _notes(plan: Plan, pretrained: PretrainedModel, stored: torch.dtype | None) -> tuple[str, ...]:
    """What of a checkpoint, whose weights are stored as `stored`, is not used as it is."""
    notes, frozen = [], frozen_dtype(plan)
    if (Path(pretrained.name_or_path) / ADAPTER_CONFIG).is_file():
        whole = "is not used: its weights are a whole model's"
        notes.append(f"the checkpoint's {ADAPTER_CONFIG} {whole}")
    if frozen is not trained_dtype(plan) and stored not in (None, frozen):
        before, after = (str(dtype).removeprefix("torch.") for dtype in (stored, frozen))
        why = f"the checkpoint's {before} weights are rounded to {after} where they are frozen"
        instead = "precision=fp32" if plan.config.model.freeze else "peft.base_weights=float32"
        notes.append(f"{why} ({instead} keeps them)")
    return tuple(notes)


def _explained(pretrained: PretrainedModel, error: BaseException | None) -> BaseException:
    """What to raise for an error of transformers: its own, or one that names the checkpoint."""
    assert error is not None, "a LoadError has one"
    if isinstance(error, RunError):
        return RunError(f"model.name_or_path = {pretrained.name_or_path}: {error}")
    of_disk = isinstance(error, OSError) and error.errno
    if of_disk or isinstance(error, RuntimeError | MemoryError):
        return error  # out of memory, a bug, or the disk's, not transformers'
    known = isinstance(error, OSError | ValueError | ImportError | SafetensorError)
    why = first_line(error).rstrip(".:") if known else f"{type(error).__name__}: {error}"
    return _refusal(pretrained, why, "another checkpoint, or another task")


@contextmanager
def _alone() -> Iterator[None]:
    """Context in which transformers looks for no adapter: it would load that one's base model."""
    from transformers.integrations import peft
    from transformers.models.auto import auto_factory

    name, none = "find_adapter_config_file", lambda *_, **__: None
    with patch.object(peft, name, none), patch.object(auto_factory, name, none):
        yield


@contextmanager
def _own_formats(plan: Plan) -> Iterator[None]:
    """Context in which trained and frozen weights are loaded, or drawn, each in their own format.

    Transformers 5.23 reads each tensor in the format that the model without data has. In another
    version all have the same format: tests/equivalence/test_frozen_weights.py tells.
    """
    from transformers import PreTrainedModel

    ask: Any = getattr(PreTrainedModel, "_get_dtype_plan", None)
    if ask is None or frozen_dtype(plan) is trained_dtype(plan):
        yield
        return

    def prepare(model: Any, dtype: torch.dtype) -> Any:
        freeze_named(plan, model)
        heads = [] if plan.config.model.freeze else trained_modules(plan, model)
        for name in heads:
            model.get_submodule(name).to(trained_dtype(plan))
        return ask(model, dtype)

    with patch.object(PreTrainedModel, "_get_dtype_plan", prepare):
        yield


def commit_of(model: PretrainedModel) -> str:
    """The commit the plan was made for; transformers' default for a local folder."""
    return model.content.partition("@")[2] or "main"


def checkpoint_configuration(plan: Plan) -> Any:
    """The checkpoint's configuration, with what training and the task ask for; or RunError."""
    from transformers import AutoConfig

    config = plan.config
    model = cast(PretrainedModel, config.model)
    try:
        loaded = load(AutoConfig, model.name_or_path, revision=commit_of(model))
    except LoadError as error:
        why = f"its config.json cannot be used: {error.why}"
        raise _refusal(model, why, "another checkpoint") from error
    loaded.use_cache = False
    if config.task.option in ("causal_lm", "masked_lm"):
        loaded.tie_word_embeddings = model.tie_word_embeddings  # as the tensors say
    if isinstance(config.task, SequenceClassification):
        if loaded.num_labels != config.task.num_labels:
            loaded.num_labels = config.task.num_labels
        loaded.problem_type = config.task.problem.full_name
        # Decoders' classes look for padding, T5's for the end of text: as the rows have them.
        loaded.pad_token_id, loaded.eos_token_id = plan.vocabulary.pad, plan.vocabulary.eos
    if model.dropout is not None:
        set_dropout(loaded, model.dropout)
    return loaded


def _judge(plan: Plan, model: Any, info: Any) -> LoadReport:
    """Which differences are a head's; RunError if some are not, or the model's size is another."""
    pretrained = cast(PretrainedModel, plan.config.model)
    needed = "a config.json that belongs to the weights"
    mismatched = {name: sizes for name, *sizes in sorted(info["mismatched_keys"])}
    unexpected = sorted(n for n in info["unexpected_keys"] if not _BUFFERS.search(n))
    strange, missing, extra = (
        [name for name in names if not _is_head(model, name)]
        for names in (mismatched, sorted(info["missing_keys"]), unexpected)
    )
    count, kind, why = sum(p.numel() for p in model.parameters()), type(model).__name__, ""
    if strange:
        found, wanted = mismatched[strange[0]]
        why = (
            f"its config.json does not describe its tensors: {len(strange)} have other sizes, "
            f"{strange[0]} is {list(found)} and should be {list(wanted)}"
        )
    elif missing:
        needed = "a complete checkpoint"
        why = (
            f"it lacks {format_number(len(missing), 'tensor')} of {kind}: "
            f"{_listed(missing)}; it is of another architecture or incomplete"
        )
    elif extra:
        why = (
            f"{len(extra)} of its tensors have no place in {kind} as its "
            f"config.json describes it: {_listed(extra)}"
        )
    elif family_of(plan.config).is_known and count != plan.size.num_parameters:
        why = (
            f"has {count} parameters where its config.json makes {plan.size.num_parameters}: a "
            "setting of it (tie_word_embeddings?) does not describe its tensors"
        )
    if why:
        raise _refusal(pretrained, why, needed)
    new = sorted({*info["missing_keys"]} - set(mismatched))
    return LoadReport(tuple(new), tuple(mismatched), tuple(unexpected))


def _is_head(model: Any, name: str) -> bool:
    """Whether a tensor's name is outside the model that all tasks share; poolers are, too."""
    prefix = model.base_model_prefix
    base = getattr(model, prefix, model)
    parts = name.removeprefix(f"{prefix}.").split(".")
    if parts[0] == "pooler":
        return True
    children = {child for child, _ in base.named_children()}
    children |= {parameter.partition(".")[0] for parameter, _ in base.named_parameters()}
    return parts[0] not in children - set(_HEADS)


def _refusal(pretrained: PretrainedModel, why: str, instead: str) -> RunError:
    return RunError(f"model.name_or_path = {pretrained.name_or_path}: {why} -> {instead}")


def _listed(names: Sequence[str]) -> str:
    """The first three, and how many there are more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def set_special_ids(model_config: Any, plan: Plan) -> None:
    """Tell transformers' configuration which ids pad, begin and end a text; bytes have eke's.

    The padding id is where decoders stop looking for a sequence's last token.
    """
    vocabulary = plan.vocabulary
    if vocabulary.is_bytes:
        return
    # Only a classifier has to know an end of text that pads.
    classifies = plan.config.task.option == "sequence_classification"
    model_config.pad_token_id = None if vocabulary.pad_is_eos and not classifies else vocabulary.pad
    model_config.bos_token_id = vocabulary.bos
    model_config.eos_token_id = vocabulary.eos
    if model_config.is_encoder_decoder:
        model_config.pad_token_id = model_config.decoder_start_token_id = vocabulary.pad


def is_padding_alone(vocabulary: Vocabulary, token: int) -> bool:
    """Whether a token stands nowhere but where a row is filled up."""
    frames = (vocabulary.frame, vocabulary.target_frame)
    written = {t for frame in frames for t in (*frame.prefix, *frame.suffix)}
    return token == vocabulary.pad and token not in {vocabulary.bos, vocabulary.eos, *written}


def learn_padding(plan: Plan, model: Any) -> tuple[str, ...]:
    """Have embeddings learn the rows of all tokens that rows are made of; returns their names.

    `nn.Embedding` gives the row of its `padding_idx` no gradient, also where that id is an end of
    text, or an ordinary token of another tokenizer.
    """
    if plan.vocabulary.is_bytes:
        return ()
    table = getattr(model.get_input_embeddings(), "weight", None)  # Perceiver's has none
    learnt = []
    for name, module in model.named_modules():
        index = getattr(module, "padding_idx", None)
        is_table = isinstance(module, nn.Embedding) and module.weight is table
        if is_table and index is not None and not is_padding_alone(plan.vocabulary, index):
            module.padding_idx = None
            learnt.append(name)
    return tuple(learnt)
