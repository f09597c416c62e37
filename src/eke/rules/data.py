"""Rules about columns, packing, padding and synthetic samples."""

import functools
from importlib.util import find_spec

from eke.common.errors import Fix
from eke.common.text import NUM_SPECIAL_TOKENS
from eke.config.schema import (
    Conversations,
    HubRows,
    Lengths,
    Mix,
    Packing,
    PretrainedModel,
    ProblemType,
    PythonSource,
    Rows,
    Seq2SeqLM,
    SequenceClassification,
    Synthetic,
    Text,
    TextColumns,
)
from eke.data.sources import BYTES, tokenizer_of
from eke.models.checkpoints import is_of_eke_without_tokenizer
from eke.models.checkpoints.architecture import can_pack
from eke.models.sizes import is_ragged
from eke.rules.model import max_positions
from eke.rules.rule import Rule, RuleInputs, if_changed, unsafe, without_effect

_MAX_COUNTED = 10**6
"""Largest number of synthetic samples whose lengths a plan draws, in a few seconds."""


def _rows(facts: RuleInputs) -> TextColumns | None:
    return facts.data if isinstance(facts.data, TextColumns) else None


def _synthetic(facts: RuleInputs) -> Synthetic | None:
    return facts.data if isinstance(facts.data, Synthetic) else None


def _cannot_pack(facts: RuleInputs) -> bool:
    config = facts.config
    return config.data.packing is not Packing.off and (
        config.task.option != "causal_lm" or not can_pack(config)
    )


def _multiple(facts: RuleInputs) -> int:
    return facts.data.pad_to_multiple_of or 1


def _pads_nothing(facts: RuleInputs) -> bool:
    task = facts.config.task
    lengths = [facts.data.seq_len]
    if isinstance(task, Seq2SeqLM):
        lengths.append(task.target_len or facts.data.seq_len)
    exact = all(length % _multiple(facts) == 0 for length in lengths)
    return _multiple(facts) > 1 and not is_ragged(facts.config) and exact


def _padded_len(facts: RuleInputs) -> int:
    multiple = _multiple(facts)
    return -(-facts.data.seq_len // multiple) * multiple


def _counts_too_many(facts: RuleInputs) -> bool:
    synthetic = _synthetic(facts)
    if synthetic is None or synthetic.lengths is Lengths.fixed:
        return False
    counted = synthetic.packing is Packing.on or synthetic.length_grouping
    return counted and max(synthetic.num_samples or 0, synthetic.num_eval_samples) > _MAX_COUNTED


def _names_no_classes(facts: RuleInputs) -> bool:
    task = facts.config.task
    if not isinstance(task, SequenceClassification) or not task.labels:
        return False
    are_classes = len(set(task.labels) - {""}) == len(task.labels) <= task.num_labels
    has_rows = isinstance(facts.data, TextColumns | Mix)
    return not are_classes or not has_rows or task.problem is ProblemType.regression


_documented_rule = functools.partial(Rule, source="docs/how-to/data.md")

RULES = dict(
    bytes_on_checkpoint=unsafe(
        key="data.tokenizer",
        when=lambda f: (
            isinstance(f.config.model, PretrainedModel)
            and tokenizer_of(f.data) == BYTES
            and not is_of_eke_without_tokenizer(f.config.model.name_or_path)
        ),
        value=lambda f: tokenizer_of(f.data),
        why="the checkpoint was trained with another tokenizer. Its embeddings do not match",
        fix=Fix("data.tokenizer=FOLDER_OR_HUB_NAME"),
        source="embeddings belong to the tokenizer they were trained with",
    ),
    datasets_missing=Rule(
        key="data",
        # A plan needs it to count the samples.
        when=lambda f: (
            (isinstance(f.data, HubRows) or f.data.option == "parquet")
            and find_spec("datasets") is None
        ),
        why="the package datasets is not installed",
        fix=Fix("data=python_source", remark='or: pip install "eke[data]"'),
        source="pyproject.toml",
    ),
    packing_needs_causal_decoder=Rule(
        key="data.packing",
        when=_cannot_pack,
        why=lambda f: (
            "needs task=causal_lm and a decoder whose mask follows from positions. "
            f"This is task={f.config.task.option} with "
            f"{getattr(f.config.model, 'model_type', '') or f.model_family.name}"
        ),
        source="transformers' masking_utils.find_packed_sequence_indices",
        versions="transformers 5",
    ),
    packing_needs_ragged=without_effect(
        key="data.packing",
        when=lambda f: not _cannot_pack(f) and not is_ragged(f.config),
        why=lambda f: f"all samples have {f.data.seq_len} tokens and need no padding",
        source="eke.training.batches.tasks",
    ),
    grouping_needs_ragged=without_effect(
        key="data.length_grouping",
        when=lambda f: not is_ragged(f.config),
        why="all samples have the same length",
        source="eke.training.batches.batches",
    ),
    multiple_needs_padding=without_effect(
        key="data.pad_to_multiple_of",
        when=_pads_nothing,
        why=lambda f: f"all samples have {f.data.seq_len} tokens, a multiple of this value",
        source="https://huggingface.co/docs/transformers/main_classes/data_collator",
    ),
    padded_fits_positions=Rule(
        key="data.pad_to_multiple_of",
        when=lambda f: f.data.seq_len <= (max_positions(f) or 0) < _padded_len(f),
        why=lambda f: (
            f"pads data.seq_len = {f.data.seq_len} to {_padded_len(f)} tokens, more than "
            f"model.max_position_embeddings = {max_positions(f)}"
        ),
        source="the table of learned positions has a fixed number of rows",
    ),
    padding_needs_eps=Rule(
        key="model.rms_norm_eps",
        when=lambda f: (
            getattr(f.config.model, "rms_norm_eps", None) == 0
            and (is_ragged(f.config) or (_multiple(f) > 1 and not _pads_nothing(f)))
        ),
        why="padding embeddings are zero. Normalising them without epsilon gives NaN",
        fix=Fix("model.rms_norm_eps=1e-6"),
        source="transformers' LlamaRMSNorm, and torch's Embedding(padding_idx)",
        versions="transformers 5",
    ),
    prompt_needs_response=_documented_rule(
        key="data.prompt",
        when=lambda f: (rows := _rows(f)) and (rows.prompt is None) is not (rows.response is None),
        why="data.prompt and data.response must both be set or both be null",
        fix=lambda f: Fix(
            "data.response=response"
            if getattr(f.data, "response", None) is None
            else "data.prompt=prompt"
        ),
    ),
    seq2seq_needs_pairs=_documented_rule(
        key="data.prompt",
        when=lambda f: (
            (rows := _rows(f))
            and f.config.task.option == "seq2seq_lm"
            and rows.prompt is None
            and rows.response is None
        ),
        why="task=seq2seq_lm needs a source column and a target column",
        fix=Fix("data.prompt=prompt", "data.response=response"),
    ),
    pairs_need_a_task=without_effect(
        key="data.prompt",
        when=lambda f: f.config.task.option not in ("causal_lm", "seq2seq_lm"),
        why=lambda f: f"task={f.config.task.option} reads the column of data.text",
        fix=Fix("data.prompt=null", "data.response=null"),
        source="docs/how-to/data.md",
    ),
    pair_needs_classifier=if_changed(
        key="data.text_pair",
        when=lambda f: f.config.task.option != "sequence_classification",
        why=lambda f: f"task={f.config.task.option} reads one text per sample",
        fix=Fix("data.text_pair=null", remark="or task=sequence_classification"),
        source="docs/how-to/data.md",
    ),
    outputs_suit_problem=Rule(
        key="task.num_labels",
        when=lambda f: (
            (f.config.task.num_labels == 1) is not (f.config.task.problem is ProblemType.regression)
        ),
        why="regression needs 1 output, classification 2 or more",
        fix=lambda f: Fix(
            f"task.num_labels={1 + (f.config.task.problem is not ProblemType.regression)}"
        ),
        source="transformers' loss for num_labels = 1",
    ),
    labels_name_classes=_documented_rule(
        key="task.labels",
        when=_names_no_classes,
        why="needs unique class names (at most task.num_labels) and data with rows",
        fix=Fix("task.labels=[]", remark="or task.num_labels=NUMBER_OF_NAMES"),
    ),
    problem_needs_labels=if_changed(
        key="task.problem",
        when=lambda f: isinstance(f.data, PythonSource | Text),
        why="the label of a text is its folder. Each text has one",
        fix=Fix("task.problem=single", remark="or data=jsonl with a column of labels"),
        source="docs/how-to/data.md",
    ),
    chat_is_causal=_documented_rule(
        key="task",
        when=lambda f: isinstance(f.data, Conversations) and f.config.task.option != "causal_lm",
        why="conversations need task=causal_lm",
        fix=Fix("task=causal_lm", remark="with a decoder as the model"),
    ),
    chat_needs_a_tokenizer=Rule(
        key="data.tokenizer",
        when=lambda f: isinstance(f.data, Conversations) and tokenizer_of(f.data) == BYTES,
        value=lambda f: tokenizer_of(f.data),
        why="the byte tokenizer has no chat template and no end-of-turn token",
        fix=Fix("data.tokenizer=FOLDER_OR_HUB_NAME", remark="model=pretrained brings its own"),
        source="https://huggingface.co/docs/transformers/chat_templating",
    ),
    stream_has_no_lengths=if_changed(
        key="data.streaming",
        when=lambda f: (
            isinstance(f.data, Rows)  # the sources of a mix are checked one by one
            and (f.data.packing is Packing.on or f.data.length_grouping)
        ),
        why="data.packing=on and data.length_grouping need all lengths before the first step",
        fix=Fix("data.packing=off", "data.length_grouping=false"),
        source="eke.training.batches.stream",
    ),
    shuffle_buffer_needs_stream=without_effect(
        key="data.shuffle_buffer",
        when=lambda f: not f.data.is_stream,
        why="needs data.streaming=true. Other data is shuffled completely",
        fix=Fix("data.streaming=true"),
        source="eke.training.batches.stream",
    ),
    stream_needs_steps=Rule(
        key="train.epochs",
        when=lambda f: f.data.is_stream and f.config.train.epochs and not f.data.num_samples,
        why="the rows of a stream are not counted. An epoch has no known length",
        fix=Fix("train.epochs=null", "train.steps=1000", remark="or data.num_samples=ROWS"),
        source="eke.training.batches.stream",
    ),
    synthetic_ids_fit=Rule(
        key="data.min_token",
        when=lambda f: (
            (d := _synthetic(f))
            and d.min_token >= min(d.max_token, f.config.model.vocab_size or d.max_token)
        ),
        why=lambda f: (
            f"must be below data.max_token and model.vocab_size = {f.config.model.vocab_size}"
        ),
        fix=Fix(f"data.min_token={NUM_SPECIAL_TOKENS}", "data.max_token=30000"),
        source="eke.training.batches.sampler",
    ),
    synthetic_ids_not_special=Rule(
        key="data.min_token",
        when=lambda f: (d := _synthetic(f)) and d.min_token < NUM_SPECIAL_TOKENS,
        why=f"ids below {NUM_SPECIAL_TOKENS} are special tokens such as padding",
        source="eke.common.text",
    ),
    min_len_within_seq_len=Rule(
        key="data.min_len",
        when=lambda f: (
            (d := _synthetic(f)) and d.lengths is not Lengths.fixed and (d.min_len or 0) > d.seq_len
        ),
        why=lambda f: f"is longer than data.seq_len = {f.data.seq_len}",
        fix=lambda f: Fix(f"data.min_len={f.data.seq_len}"),
        source="eke.data.sources.packing",
    ),
    min_len_needs_ragged=without_effect(
        key="data.min_len",
        when=lambda f: (d := _synthetic(f)) and d.lengths is Lengths.fixed,
        why="with data.lengths=fixed all samples have data.seq_len tokens",
        fix=Fix("data.lengths=uniform"),
        source="eke.data.sources.packing",
    ),
    median_needs_lognormal=without_effect(
        key="data.median_len",
        when=lambda f: (d := _synthetic(f)) and d.lengths is not Lengths.lognormal,
        why="needs data.lengths=lognormal",
        fix=Fix("data.lengths=lognormal"),
        source="eke.data.sources.packing",
    ),
    lengths_are_counted=Rule(
        key="data.num_samples",
        when=_counts_too_many,
        value=lambda f: f.data.num_samples or f.data.num_eval_samples,
        why=f"packing and length grouping support at most {_MAX_COUNTED} synthetic samples",
        fix=lambda f: Fix(
            f"data.num_samples={_MAX_COUNTED}",
            f"data.num_eval_samples={min(f.data.num_eval_samples, _MAX_COUNTED)}",
        ),
        source="a time limit for making a plan",
    ),
)
