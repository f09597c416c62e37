"""Training samples of each task from token sequences, with labels aligned with the logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from eke.common.errors import ChangedError
from eke.common.text import IGNORED
from eke.config.schema import Config, Conversations, CustomData, Packing, Rows, Synthetic
from eke.data.sources import (
    BYTE_TOKENS,
    Manifest,
    PackedRows,
    SpecialTokens,
    Store,
    Vocabulary,
    first_fit,
    labels_of,
    open_corpus,
    open_store,
    read_manifest,
    request_of,
    store_folder,
    synthetic_lengths,
    window_length,
)
from eke.models.sizes import is_ragged
from eke.plan.planner import Plan, check_inputs, plans_of_sources
from eke.plan.planner.samples import DEFAULT_SYNTHETIC_SAMPLES
from eke.training.batches.sampler import (
    RandomTokens,
    StoredRows,
    Windows,
    as_label,
    evenly_spaced,
    pack_windows,
    seeded,
    stored_windows,
)
from eke.training.batches.stream import StreamedRows

_Source = Windows | StoredRows | StreamedRows | RandomTokens
"""Sequences by number, with `row`, `label`, and `lengths` of all. `framed` ones have special tokens
and a boundary between source and target. Others are slices of one long text."""

Sample = dict[str, np.ndarray]
"""Arrays of a sample, int64: `input_ids` `[length]`, `labels` `[length]`, `[target]`, `[]` or
`[classes]` (float32 if they are not a single class), `position_ids` `[length]` of concatenated
sequences, `token_type_ids` `[length]` of pairs. `skipped` `[]` is the number of rows of a stream
skipped before. NumPy is faster than torch for small samples (notes/lab/loop.md, 2026-11-23)."""

Key = tuple[int, int]
"""Epoch and index of a sample."""


@dataclass(frozen=True)
class TaskSamples:
    """Dataset of one task and one source."""

    source: _Source
    config: Config
    vocabulary: Vocabulary = BYTE_TOKENS

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_stream(self) -> bool:
        """True if samples come in their own order, numbered across epochs."""
        return isinstance(self.source, StreamedRows)

    def __getitem__(self, key: Key) -> Sample:
        """Return the sample with this number in this epoch (masking differs between epochs)."""
        sample = TASKS[self.config.targets.option](self, *key)
        if isinstance(self.source, StreamedRows):
            sample["skipped"] = np.asarray(self.source.read_row(key[1])[2])
        return sample

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sample, source and target together, `[samples]`."""
        assert not isinstance(self.source, StreamedRows), "streams are not read in advance"
        return self.source.lengths()


@dataclass(frozen=True)
class PackedSamples:
    """Dataset of packed rows, whose samples do not attend to each other."""

    samples: TaskSamples
    packs: PackedRows
    chosen: np.ndarray
    """Packed row of each index."""
    is_stream = False

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        members = self.packs.row(int(self.chosen[index]))
        return concatenate_samples([self.samples[epoch, int(member)] for member in members])

    def lengths(self) -> np.ndarray:
        """Return the tokens of each row."""
        sums = np.concatenate([[0], np.cumsum(self.samples.lengths()[self.packs.members])])
        of_rows = sums[self.packs.offsets[1:]] - sums[self.packs.offsets[:-1]]
        return np.asarray(of_rows[self.chosen])


@dataclass(frozen=True)
class MixSamples:
    """Dataset of the samples of all sources of a mix, each with the `source` of its labels."""

    parts: tuple[TaskSamples | PackedSamples, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, key: Key) -> Sample:
        (epoch, index), source = key, 0
        while index >= len(self.parts[source]):
            index -= len(self.parts[source])
            source += 1
        part = self.parts[source]
        # Sources have separate epochs, so that rows with equal numbers are masked differently.
        own = (epoch * len(self.parts) + source, index)
        sample = part[(source, epoch * len(part) + index) if part.is_stream else own]
        if any(isinstance(part, PackedSamples) for part in self.parts):
            sample = {"position_ids": np.arange(len(sample["input_ids"])), **sample}
        return {**sample, "source": np.full(sample["labels"].shape, source)}

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sample."""
        return np.concatenate([part.lengths() for part in self.parts])


def concatenate_samples(samples: list[Sample]) -> Sample:
    """Concatenate samples, separated by positions that restart at 0."""
    names = [name for name in ("input_ids", "labels", "source") if name in samples[0]]
    joined: Sample = {name: np.concatenate([each[name] for each in samples]) for name in names}
    places = [np.arange(len(sample["input_ids"])) for sample in samples]
    return {**joined, "position_ids": np.concatenate(places)}


def causal_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """Return a sample whose positions predict the next token, except prompt and last position."""
    row = samples.source.row(index)
    labels = np.empty_like(row.tokens)
    labels[:-1] = row.tokens[1:]
    labels[-1] = IGNORED
    labels[: max(0, row.cut - 1)] = IGNORED
    if row.trained is not None:
        labels[:-1][~row.trained[1:]] = IGNORED
    return {"input_ids": row.tokens, "labels": labels}


def masked_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """Return a sample of BERT's objective (Devlin et al. 2018, arXiv:1810.04805, appendix A.1)."""
    config, vocabulary = samples.config, samples.vocabulary
    assert vocabulary.mask is not None, "a tokenizer without mask token is rejected when loaded"
    tokens = samples.source.row(index).tokens
    if not samples.source.framed and not vocabulary.is_bytes:
        _add_special_tokens(tokens, vocabulary, vocabulary.frame)
    generator = seeded(config.seed, epoch, index)
    chosen = torch.rand(len(tokens), generator=generator).numpy() < config.targets.mask_frac
    at_least = int(torch.randint(len(tokens), (1,), generator=generator))
    ordinary = ~np.isin(tokens, vocabulary.special)
    chosen &= ordinary
    if not chosen.any():  # a row without a target would have no effect
        places = np.flatnonzero(ordinary)
        chosen[places[at_least % len(places)] if len(places) else at_least] = True
    what = torch.rand(len(tokens), generator=generator).numpy()
    below = vocabulary.random_below(config.model.vocab_size)
    random = torch.randint(vocabulary.first_random, below, tokens.shape, generator=generator)
    inputs = tokens.copy()
    inputs[chosen & (what < 0.8)] = vocabulary.mask
    replaced = chosen & (what >= 0.8) & (what < 0.9)
    inputs[replaced] = random.numpy()[replaced]
    return {"input_ids": inputs, "labels": np.where(chosen, tokens, IGNORED)}


def sequence_classification(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """Return a sample with one label per sequence, and token types of a pair of texts."""
    source = samples.source
    row = source.row(index)
    tokens = row.tokens
    if not source.framed:
        _add_special_tokens(tokens, samples.vocabulary, samples.vocabulary.frame)
    sample = {"input_ids": tokens, "labels": as_label(samples.config.targets, source.label(index))}
    if samples.vocabulary.has_types:
        sample["token_type_ids"] = (np.arange(len(tokens)) >= row.cut).astype(np.int64)
    return sample


def _add_special_tokens(tokens: np.ndarray, vocabulary: Vocabulary, frame: SpecialTokens) -> None:
    """Write special tokens around a slice of text, in place. Bytes end in the end of text."""
    prefix, suffix = frame.prefix, frame.suffix
    if vocabulary.is_bytes:
        assert vocabulary.eos is not None, "byte tokens have an end of text"
        suffix = (vocabulary.eos,)
    tokens[: len(prefix)] = prefix[: len(tokens)]
    tokens[max(0, len(tokens) - len(suffix)) :] = suffix[: len(tokens)]


def seq2seq_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """Return source and target of a row. The second part of a slice of text is the target."""
    config, vocabulary = samples.config, samples.vocabulary
    row = samples.source.row(index)
    tokens, cut = row.tokens, row.cut
    if not samples.source.framed:
        # Ragged: the same proportion.
        cut = max(1, len(tokens) * config.data.seq_len // window_length(config))
        if not vocabulary.is_bytes:
            _add_special_tokens(tokens[:cut], vocabulary, vocabulary.frame)
        _add_special_tokens(tokens[cut:], vocabulary, vocabulary.target_frame)
    return {"input_ids": tokens[:cut], "labels": tokens[cut:]}


TASKS: dict[str, Callable[[TaskSamples, int, int], Sample]] = {
    "causal_lm": causal_lm,
    "masked_lm": masked_lm,
    "sequence_classification": sequence_classification,
    "seq2seq_lm": seq2seq_lm,
}
"""`task` option -> function that returns a sample."""


def is_packed(config: Config) -> bool:
    """Return whether several samples can share a row."""
    packing = config.data.packing
    return packing is Packing.padding_free or (packing is Packing.on and is_ragged(config))


def open_split(plan: Plan, evaluation: bool) -> TaskSamples | PackedSamples | MixSamples:
    """Open the samples of a split, as many as planned."""
    if plan.sources:
        parts = (_open_part(part, evaluation) for part in plans_of_sources(plan))
        return MixSamples(tuple(parts))
    return _open_part(plan, evaluation)


def _open_part(plan: Plan, evaluation: bool) -> TaskSamples | PackedSamples:
    config = plan.config
    wanted = plan.steps.num_eval_samples if evaluation else plan.steps.num_train_samples
    packing = config.data.packing is Packing.on and is_ragged(config)
    keep = None if packing else wanted
    if isinstance(config.data, Synthetic):
        source, packs = _random(config, config.data, keep, evaluation)
    elif plan.store:
        source, packs = _stored(plan, keep, evaluation)
    else:
        corpus, packs = open_corpus(config), None
        assert corpus is not None, "data that is neither synthetic nor prepared is text"
        pieces = corpus.evaluation if evaluation else corpus.train
        how = labels_of(config, corpus), wanted, partial(check_inputs, plan)
        source = pack_windows(pieces, window_length(config), *how)
    samples = TaskSamples(source, config, plan.vocabulary)
    if packs is None:
        return samples
    return PackedSamples(samples, packs, evenly_spaced(len(packs), wanted))


def class_names(plan: Plan) -> tuple[str, ...]:
    """Return class names by number, () if there are none."""
    if plan.sources:
        return class_names(plans_of_sources(plan)[0])
    config = plan.config
    if config.targets.per_token or isinstance(config.data, Synthetic | CustomData):
        return ()
    if isinstance(config.data, Rows):
        return _open_store(plan).manifest.label_names
    corpus = open_corpus(config)
    assert corpus is not None, "data that is neither synthetic nor rows is text"
    return tuple(labels_of(config, corpus))


def chat_manifest(plan: Plan) -> Manifest | None:
    """Return the manifest of a plan's conversations, which share a template. None without any."""
    parts = plans_of_sources(plan) or [plan]
    found = [_open_store(p).manifest for p in parts if isinstance(p.config.data, Conversations)]
    ends = dict.fromkeys(end for manifest in found for end in manifest.ends_of_turn)
    return replace(found[0], ends_of_turn=tuple(ends)) if found else None


def _random(
    config: Config, data: Synthetic, keep: int | None, evaluation: bool
) -> tuple[_Source, PackedRows | None]:
    labels = config.targets.num_labels or 2
    drawn = data.num_eval_samples if evaluation else data.num_samples or DEFAULT_SYNTHETIC_SAMPLES
    count = drawn if keep is None else keep
    length, split = window_length(config), int(evaluation)
    problem = config.targets.problem
    size = config.model.vocab_size or BYTE_TOKENS.size  # own code does not say its size
    source = RandomTokens(data, length, size, labels, count, split, problem)
    if keep is not None:
        return source, None
    return source, first_fit(synthetic_lengths(data, length, split, count), data.seq_len)


def _stored(plan: Plan, keep: int | None, evaluation: bool) -> tuple[_Source, PackedRows | None]:
    store = _open_store(plan)
    split = "evaluation" if evaluation else "train"
    if store.manifest.streams:
        assert keep is not None
        return stored_windows(store, evaluation, window_length(plan.config), keep), None
    if plan.config.data.is_stream and not evaluation:
        return StreamedRows(plan, store), None
    rows = StoredRows(store, split, keep)
    if keep is not None:
        return rows, None
    return rows, PackedRows(store.array(f"{split}_members"), store.array(f"{split}_offsets"))


def _open_store(plan: Plan) -> Store:
    """Open the plan's store, and prepare it again if the cache was deleted."""
    folder = store_folder(plan.store)
    manifest = read_manifest(folder)
    if manifest is None:
        request = request_of(plan.config)
        assert request is not None, "the plan has prepared tokens"
        store = open_store(request)
    else:
        store = Store(folder, manifest)
    if store.manifest.digest != plan.data_fingerprint:
        raise ChangedError("the data changed since the plan was made -> the same command again")
    return store
