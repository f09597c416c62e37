"""Which samples one split has: from the store, the text or the random numbers of the plan."""

from functools import partial

from eke.common.errors import ChangedError
from eke.config.schema import Config, Packing, Rows, SequenceClassification, Synthetic
from eke.data.sources import (
    Packs,
    Store,
    first_fit,
    largest_labels,
    open_corpus,
    open_store,
    read_manifest,
    request_of,
    store_folder,
    synthetic_lengths,
    window_length,
)
from eke.models.sizes import is_ragged
from eke.plan.planner import Plan, check_inputs
from eke.plan.planner.samples import DEFAULT_SYNTHETIC_SAMPLES
from eke.training.batches.samples import (
    RandomTokens,
    Source,
    pack_windows,
    spread,
    stored_packs,
    stored_rows,
    stored_windows,
)
from eke.training.batches.tasks import PackedSamples, TaskSamples


def is_packed(config: Config) -> bool:
    """Several samples may lie end to end in one row."""
    packing = config.data.packing
    return packing is Packing.padding_free or (packing is Packing.on and is_ragged(config))


def open_split(plan: Plan, *, evaluation: bool) -> TaskSamples | PackedSamples:
    """The samples of one split, as many as planned."""
    config = plan.config
    wanted = plan.steps.num_eval_samples if evaluation else plan.steps.num_train_samples
    packing = config.data.packing is Packing.on and is_ragged(config)
    keep = None if packing else wanted
    if isinstance(config.data, Synthetic):
        source, packs = _random(config, config.data, keep, evaluation)
    elif plan.store:
        source, packs = _stored(plan, keep, evaluation)
    else:
        source, packs = _bytes(plan, wanted, evaluation), None
    samples = TaskSamples(source, config, plan.vocabulary)
    return samples if packs is None else PackedSamples(samples, packs, spread(len(packs), wanted))


def class_names(plan: Plan) -> tuple[str, ...]:
    """Names of the classes in the order of their numbers; empty where they have none."""
    config = plan.config
    if not isinstance(config.task, SequenceClassification) or isinstance(config.data, Synthetic):
        return ()
    if isinstance(config.data, Rows):
        return _open(plan).manifest.label_names
    corpus = open_corpus(config)
    assert corpus is not None, "all that is neither synthetic nor rows is text"
    return tuple(largest_labels(corpus, config.task.num_labels))


def _random(
    config: Config, data: Synthetic, keep: int | None, evaluation: bool
) -> tuple[Source, Packs | None]:
    labels = config.task.num_labels if isinstance(config.task, SequenceClassification) else 2
    drawn = data.num_eval_samples if evaluation else data.num_samples or DEFAULT_SYNTHETIC_SAMPLES
    count = drawn if keep is None else keep
    length, split = window_length(config), int(evaluation)
    source = RandomTokens(data, length, config.model.vocab_size, labels, count, split)
    if keep is not None:
        return source, None
    return source, first_fit(synthetic_lengths(data, length, split, count), data.seq_len)


def _stored(plan: Plan, keep: int | None, evaluation: bool) -> tuple[Source, Packs | None]:
    store = _open(plan)
    split = "evaluation" if evaluation else "train"
    if store.manifest.streams:
        assert keep is not None
        return stored_windows(store, evaluation, window_length(plan.config), keep), None
    return stored_rows(store, split, keep), stored_packs(store, split) if keep is None else None


def _open(plan: Plan) -> Store:
    """The store the plan counted, prepared again if the cache folder was emptied since."""
    folder = store_folder(plan.store)
    manifest = read_manifest(folder)
    store = None if manifest is None else Store(folder, manifest)
    if store is None:
        request = request_of(plan.config)
        assert request is not None, "the plan has prepared tokens"
        store = open_store(request)
    if store.manifest.digest != plan.data_fingerprint:
        raise ChangedError(
            "the data is no longer what was planned: its content changed -> the same command again"
        )
    return store


def _bytes(plan: Plan, keep: int, evaluation: bool) -> Source:
    config = plan.config
    corpus = open_corpus(config)
    assert corpus is not None, "all that is neither synthetic nor prepared is text"
    if isinstance(config.task, SequenceClassification):
        labels = largest_labels(corpus, config.task.num_labels)
    else:
        labels = sorted({piece.label for piece in corpus.pieces()})
    pieces = corpus.evaluation if evaluation else corpus.train
    check = partial(check_inputs, plan)
    return pack_windows(pieces, window_length(config), labels, keep, check)
