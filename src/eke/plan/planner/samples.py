"""Number of samples in the data, and division of a step's samples into micro-batches."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import fields, replace

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_count, format_number, format_value, override
from eke.config import schema
from eke.config.mixing import source_configs, source_names, source_shares, to_source_problem
from eke.config.schema import Config, CustomData, Mix, Rows, SequenceClassification
from eke.data import sources
from eke.data.sources import Manifest, PrepareRequest, Store, Vocabulary
from eke.models.checkpoints.architecture import router_loss
from eke.models.families import family_of
from eke.plan.planner.inputs import DATA, inputs_of
from eke.plan.planner.plan import BatchPlan, DataPlan, Decision, ShownDecision

DEFAULT_SYNTHETIC_SAMPLES = 512
"""Dataset size in https://huggingface.co/docs/transformers/model_memory_anatomy."""

ROW_NUMBERS = "data.label of the rows"
"""Key of the decision for rows with other class numbers than the model."""

DEFAULT_STEPS = 300
"""Steps without `train.steps` and `train.epochs`: on two cores the loss of the default run falls
clearly within about a minute."""


def plan_data(config: Config, decisions: list[Decision]) -> DataPlan:
    """Count the samples after preparing tokens if needed; ConfigError if the data is unusable."""
    if isinstance(config.data, schema.Synthetic):
        return _plan_synthetic(config, config.data, decisions)
    if isinstance(config.data, CustomData):
        return _own(config.data, decisions)
    if isinstance(config.data, Mix):
        return _plan_mix(config, config.data, decisions)
    request = sources.request_of(config)
    if request is not None:
        return _plan_prepared(config, request, decisions)
    source = sources.open_corpus(config)
    assert source is not None, "bytes of a text"
    length, parts = sources.window_length(config), (source.train, source.evaluation)
    available = [sources.count_windows(part, length) for part in parts]
    longest = min(sources.longest_window(part) for part in parts)
    _note_folders(config, source, decisions)
    train, evaluation = _split_sizes(config, available, decisions, longest)
    return DataPlan(train, evaluation, sources.fingerprint(source))


def _own(data: CustomData, decisions: list[Decision]) -> DataPlan:
    """Plan samples of own code, which a separate process has counted."""
    train, evaluation = data.train_length, data.eval_length
    if train is not None and data.num_samples is None:
        reason = f"all training samples of {data.target}"
        decisions.append(Decision("data.num_samples", str(train), reason))
    counted = [
        wanted if found is None else min(wanted or found, found)
        for found, wanted in ((train, data.num_samples), (evaluation, data.num_eval_samples))
    ]
    # A stream without a length is one epoch of as many samples as any run can take.
    return DataPlan(counted[0] or schema.MAX_STEPS, counted[1] or 0, data.content)


def _note_folders(config: Config, source: sources.TextSource, decisions: list[Decision]) -> None:
    if isinstance(config.task, SequenceClassification):
        names = sources.largest_labels(source, config.task.num_labels)
        decisions.append(_numbered(names, "the largest folders (other text is excluded)"))


def _numbered(names: Sequence[str], reason: str) -> Decision:
    numbered = " ".join(f"{name}={n}" for n, name in enumerate(names))
    value = numbered if len(numbered) <= 40 else f"{len(names)} classes"
    return Decision("data.label", value, f"{reason}: {', '.join(names)}")


def _plan_synthetic(config: Config, data: schema.Synthetic, decisions: list[Decision]) -> DataPlan:
    drawn = data.num_samples or DEFAULT_SYNTHETIC_SAMPLES
    if data.num_samples is None:
        decisions.append(Decision("data.num_samples", str(drawn), "dataset size of the guides"))
    # The fingerprint covers all settings of the random samples except number and length.
    shared = {field.name for field in fields(schema.Data)}
    own = [field.name for field in fields(data) if field.name not in shared]
    text = repr([(name, getattr(data, name)) for name in own])
    fingerprint = f"synthetic {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if data.packing is not schema.Packing.on:
        return DataPlan(drawn, data.num_eval_samples, fingerprint)
    lengths = [
        sources.synthetic_lengths(data, data.seq_len, split, count)
        for split, count in enumerate((drawn, data.num_eval_samples))
    ]
    rows = [len(sources.first_fit(found, data.seq_len)) for found in lengths]
    decisions.append(_packed(rows[0], drawn, int(lengths[0].sum()), data.seq_len))
    return DataPlan(rows[0], rows[1], f"{fingerprint} {drawn}+{data.num_eval_samples}")


def _packed(rows: int, samples: int, tokens: int, seq_len: int) -> Decision:
    share, held = tokens / (rows * seq_len), format_number(rows, "row")
    reason = f"{format_number(samples, 'sample')} in {held} of {seq_len} tokens, {share:.1%} filled"
    return Decision("data.packing", held, reason)


def _plan_prepared(config: Config, request: PrepareRequest, decisions: list[Decision]) -> DataPlan:
    store = sources.open_store(request)
    manifest = store.manifest
    vocabulary = replace(manifest.vocabulary, tokenizer=request.tokenizer)
    problems = _too_small_a_vocabulary(config, vocabulary) + _missing_eos(config, vocabulary)
    if problems := problems + too_many_bad(config, manifest):
        raise ConfigError(problems)
    if manifest.streams:
        train, evaluation = _windows(config, manifest, decisions)
    else:
        train, evaluation = _count_rows(config, store, decisions)
    _note_tokens(manifest, decisions)
    if not vocabulary.is_bytes:
        pads = ", EOS is the padding token" if vocabulary.pad_is_eos else ""
        reason, path = f"{vocabulary.size} tokens{pads}", request.tokenizer
        shown = path if len(path) <= 40 else f"...{path[-37:]}"
        decisions.append(Decision("data.tokenizer", shown, reason))
    warnings = _token_warnings(config, manifest)
    return DataPlan(train, evaluation, manifest.digest, vocabulary, request.key, warnings)


def _plan_mix(config: Config, mix: Mix, decisions: list[Decision]) -> DataPlan:
    """Plan each source, and the samples of an epoch and of an evaluation by weight."""
    configs, names = source_configs(config), source_names(mix)
    parts, problems = [], []
    for number, (each, name) in enumerate(zip(configs, names, strict=True)):
        own: list[Decision] = []
        try:
            parts.append(plan_data(each, own))
        except ConfigError as error:
            problems += [to_source_problem(problem, number) for problem in error.problems]
        decisions += [replace(note, key=f"{note.key} of {name}") for note in own]
    found = [sources.read_manifest(sources.store_folder(part.store)) for part in parts]
    if problems := problems or _class_problems(configs, found) + _template_problems(mix, found):
        raise ConfigError(list(dict.fromkeys(problems)))
    shares, available = source_shares(mix, [p.train for p in parts]), sum(p.train for p in parts)
    made = tuple(
        replace(
            part,
            # For a stream, the number of first rows, which are prepared for the plan.
            train=manifest.counts["train"] if manifest and each.data.is_stream else part.train,
            name=name,
            share=share,
            evaluation=min(part.evaluation, max(1, round(share * mix.num_eval_samples))),
            inputs={k: v for k, v in inputs_of(each, part.fingerprint).items() if k == DATA},
        )
        for name, share, part, each, manifest in zip(
            names, shares, parts, configs, found, strict=True
        )
    )
    described = [
        (s.name, s.share, s.train, s.fingerprint, *_order_of(each.data))
        for s, each in zip(made, configs, strict=True)
    ]
    content, counted = repr(described), min(mix.num_samples or available, available)
    return replace(
        parts[0],
        train=_streamed(config) if mix.is_stream else counted,
        evaluation=sum(source.evaluation for source in made),
        fingerprint=f"mix {hashlib.sha256(content.encode()).hexdigest()[:16]}",
        store="",
        warnings=tuple(dict.fromkeys(text for part in parts for text in part.warnings)),
        sources=made,
    )


def _class_problems(
    configs: Sequence[Config], manifests: Sequence[Manifest | None]
) -> list[Problem]:
    found: list[Sequence[str]] = []
    for config, manifest in zip(configs, manifests, strict=True):
        corpus = sources.open_corpus(config)
        if isinstance(config.task, SequenceClassification) and corpus is not None:
            found.append(sources.largest_labels(corpus, config.task.num_labels))
        else:
            found.append(manifest.label_names if manifest else ())
    shown = [", ".join(names) or "numbers" for names in found]
    why = f"classes differ from the first source: {shown[0]}"
    fix = Fix(remark="use the same class names or numbers in all sources")
    if all(set(names) == set(found[0]) for names in found):
        fix = Fix(override("task.labels", list(found[0])))
    numbered = [each for each in enumerate(shown) if each[1] != shown[0]]
    return [
        Problem(f"data.sources[{n}]", names, why, fix, "other_classes") for n, names in numbered
    ]


def _template_problems(mix: Mix, manifests: Sequence[Manifest | None]) -> list[Problem]:
    chats = {n: m.chat_template for n, m in enumerate(manifests) if m and m.chat_template}
    first = next(iter(chats), 0)
    typed = [source.get("chat_template") for source in mix.sources]
    why = f"differs from data.sources[{first}], but a model is saved with one template"
    return [
        Problem(
            f"data.sources[{n}].chat_template",
            format_value(typed[n]),
            why,
            Fix(override(f"data.sources.{n}.chat_template", typed[first])),
            "other_templates",
        )
        for n, template in chats.items()
        if template != chats[first]
    ]


def _too_small_a_vocabulary(config: Config, vocabulary: Vocabulary) -> list[Problem]:
    size = getattr(config.model, "vocab_size", None)
    if size is None or vocabulary.size <= size:
        return []
    if isinstance(config.model, schema.PretrainedModel):
        why = f"has {vocabulary.size} tokens, but the checkpoint's embedding has {size} rows"
        fix = Fix("data.tokenizer=auto", remark="the checkpoint's tokenizer")
        tokenizer = vocabulary.tokenizer
        if tokenizer == config.model.name_or_path:
            fix = Fix("data.tokenizer=THE_ONE_IT_WAS_TRAINED_WITH")
        return [Problem("data.tokenizer", tokenizer, why, fix, "vocabulary_holds_tokens")]
    why = f"is smaller than the {vocabulary.size} tokens of data.tokenizer={vocabulary.tokenizer}"
    fix = Fix(f"model.vocab_size={vocabulary.size}")
    return [Problem("model.vocab_size", str(size), why, fix, "vocabulary_holds_tokens")]


def _missing_eos(config: Config, vocabulary: Vocabulary) -> list[Problem]:
    """Return the problem of a tokenizer without EOS, which T5's classifier needs."""
    is_written = vocabulary.is_bytes or vocabulary.eos in vocabulary.frame.suffix
    classifies = isinstance(config.task, SequenceClassification)
    if is_written or not classifies or not family_of(config).is_encoder_decoder:
        return []
    why, fix = "writes no EOS token, which T5 needs for classification", Fix("data.tokenizer=bytes")
    return [Problem("data.tokenizer", vocabulary.tokenizer, why, fix, "wrong_tokenizer")]


def _note_tokens(manifest: Manifest, decisions: list[Decision]) -> None:
    first, last = (" ".join(repr(token)[1:-1] or "''" for token in e) for e in manifest.first_row)
    reason = f"{first} .. {last}" if last else first
    if not reason:
        return
    if manifest.num_other_prompts:
        count = format_number(manifest.num_other_prompts, "row")
        reason += f", {count} with other first tokens than the separate prompt"
    decisions.append(Decision("data tokens", "first row", reason))


def _token_warnings(config: Config, manifest: Manifest) -> tuple[str, ...]:
    found = []
    if manifest.plain_markers:
        markers = ", ".join(manifest.plain_markers)
        found.append(f"the tokenizer splits {markers} of the chat template into ordinary tokens")
    if manifest.num_doubled:
        count = format_number(manifest.num_doubled, "row")
        found.append(f"{count} with a special token twice at an end, from text and tokenizer")
    if manifest.vocabulary.eos is None and config.task.option == "causal_lm":
        found.append("the tokenizer has no EOS token, so the model does not learn to stop")
    return tuple(found)


def too_many_bad(config: Config, manifest: Manifest) -> list[Problem]:
    """Return the problem of more unusable rows than allowed."""
    data = config.data
    if not isinstance(data, schema.TextColumns | schema.Conversations) or not manifest.num_bad:
        return []
    share = manifest.num_bad / manifest.num_rows
    if share <= data.max_bad_frac:
        return []
    limit = f", more than data.max_bad_frac = {data.max_bad_frac:g}"
    tolerated = f"data.max_bad_frac={min(1.0, math.ceil(share * 1000) / 1000):g}"
    if isinstance(data, schema.Conversations):
        limit, tolerated = "", "data.bad_rows=skip"
    why = (
        f"{manifest.num_bad} of {manifest.num_rows} rows cannot be used ({share:.2%}){limit}: "
        f"{'; '.join(manifest.bad_rows)}"
    )
    more = " ..." if manifest.num_bad > len(manifest.bad_rows) else ""
    fix = Fix(manifest.bad_fix or tolerated)
    key = "data.name" if isinstance(data, schema.HubRows) else "data.path"
    return [Problem(key, getattr(data, key.partition(".")[2]), why + more, fix, "bad_rows")]


def _windows(config: Config, manifest: Manifest, decisions: list[Decision]) -> tuple[int, int]:
    length = sources.window_length(config)
    parts = [[s.size for s in manifest.streams if s.evaluation is e] for e in (False, True)]
    available = [sum(size // length for size in part) for part in parts]
    if manifest.num_replaced:
        reason = "bytes of the text that are not UTF-8 became U+FFFD"
        replaced = f"{manifest.num_replaced} replaced"
        decisions.append(ShownDecision("data.path", replaced, reason))
    source = sources.open_corpus(config)
    assert source is not None, "windows are cut from text"
    _note_folders(config, source, decisions)
    return _split_sizes(config, available, decisions, min(max(part, default=0) for part in parts))


def _count_rows(config: Config, store: Store, decisions: list[Decision]) -> tuple[int, int]:
    """Return the rows of training and evaluation. Add decisions about unusable rows and labels."""
    manifest = store.manifest
    usable = manifest.counts["cuts"]
    bad = f"; first: {manifest.bad_rows[0]}" if manifest.bad_rows else ""
    reason = (
        f"of {manifest.num_rows} read; {manifest.num_bad} bad, {manifest.num_empty} empty "
        f"(excluded), {manifest.num_truncated} truncated{bad}"
    )
    has_all = usable == manifest.num_rows and not manifest.num_truncated
    kind = Decision if has_all else ShownDecision
    decisions.append(kind("data rows", format_count(usable), reason))
    if manifest.num_trained:
        tokens = manifest.counts["tokens"]
        reason = f"{manifest.num_trained} of {tokens} tokens, the others are context"
        decisions.append(Decision("data trained", f"{manifest.num_trained / tokens:.1%}", reason))
    if manifest.ignored:
        keys = format_number(len(manifest.ignored), "key")
        reason = f"ignored: {', '.join(manifest.ignored)}"
        decisions.append(ShownDecision("data ignored", keys, reason))
    if manifest.label_names:
        # A checkpoint's head keeps its numbers, whichever order the rows have.
        own = list(manifest.label_names) == getattr(config.model, "label_names", [])
        order = "the checkpoint's numbers" if own else "as named in the rows"
        decisions.append(_numbered(manifest.label_names, order))
        if (given := manifest.given_names) != manifest.label_names[: len(given)]:
            decisions.append(replace(_numbered(given, "matched by name"), key=ROW_NUMBERS))
    available = [manifest.counts["train"], manifest.counts["evaluation"]]
    if config.data.is_stream:
        return _streamed(config), min(config.data.num_eval_samples, available[1])
    if config.data.packing is schema.Packing.on:
        offsets, rows = store.array("offsets"), store.array("train")
        tokens = int((offsets[rows + 1] - offsets[rows]).sum())
        packs = [manifest.counts[f"{part}_offsets"] - 1 for part in ("train", "evaluation")]
        decisions.append(_packed(packs[0], available[0], tokens, config.data.seq_len))
        available = packs
    return _split_sizes(config, available, decisions)


def _streamed(config: Config) -> int:
    """Return the samples of an epoch of a stream, by default all samples of the run."""
    taken = (config.train.steps or DEFAULT_STEPS) * plan_batch(config, []).samples_per_step
    return config.data.num_samples or taken


def _order_of(data: schema.Data) -> tuple[int | None, ...]:
    """Return the settings that determine the order of a stream, in addition to rows and seed."""
    if not isinstance(data, Rows) or not data.streaming:
        return ()
    return data.shuffle_buffer, data.num_samples


def _split_sizes(
    config: Config, available: list[int], decisions: list[Decision], longest: int = 0
) -> tuple[int, int]:
    """Return the numbers of samples for training and evaluation.

    `available`: samples of both parts in the data, training first. `longest`: tokens of the longest
    sample that both parts could have, for the fix. ConfigError: A part has no sample.
    """
    data, length = config.data, sources.window_length(config)
    if not all(available):
        part = "evaluation" if available[0] else "training"
        why = f"the {part} text is shorter than one sample of {length} tokens"
        # In seq2seq a sample has source and target.
        room = longest * data.seq_len // length
        fix = Fix(f"data.seq_len={room}") if room >= 4 else Fix("data.path=LONGER_TEXT")
        raise ConfigError(Problem("data.seq_len", str(data.seq_len), why, fix, "too_few_samples"))
    train, reason = min(data.num_samples or available[0], available[0]), ""
    if data.num_samples is None:
        reason = f"all training text in samples of {length} tokens"
        if isinstance(data, Rows):
            reason = "all training rows"
    elif train < data.num_samples:
        source = "file" if isinstance(data, Rows) else "text"
        reason = f"all of the training {source}, {data.num_samples} were requested"
    if reason:
        decisions.append(Decision("data.num_samples", str(train), reason))
    return train, min(data.num_eval_samples, available[1])


def samples_to_keep(config: Config) -> int:
    """Return the samples per step that batch=auto keeps: `batch.target`, else as batch=fixed."""
    return config.batch.target or schema.DEFAULT_PER_DEVICE * config.distributed.num_processes


def possible_batches(config: Config) -> list[Config]:
    """Return configurations with every micro-batch for the same samples per step, ascending."""
    target = samples_to_keep(config)
    each = target // config.distributed.num_processes  # a rule checks divisibility
    small = [size for size in range(1, int(each**0.5) + 1) if each % size == 0]
    sizes = sorted({*small, *(each // size for size in small)})
    if router_loss(config) is not None:  # depends on the micro-batch, as a mean over it
        kept = config.batch.per_device or schema.DEFAULT_PER_DEVICE
        sizes = [max(size for size in sizes if size <= kept)]
    batch = replace(config.batch, option="fixed", target=target)
    return [replace(config, batch=replace(batch, per_device=size)) for size in sizes]


def plan_batch(config: Config, decisions: list[Decision]) -> BatchPlan:
    """Plan the micro-batches, with one sample each before batch=auto has chosen."""
    batch, count = config.batch, config.distributed.num_processes
    alone = config.distributed.option == "dp"  # one process with all devices
    unit = "devices" if alone else "processes"
    accumulation = batch.accumulation or 1
    if batch.target is not None or batch.per_device is None:
        target = samples_to_keep(config)
        accumulation = target // (batch.micro_batch * count)
        reason = f"batch.target {target} / ({batch.micro_batch} x {count} {unit})"
        decisions.append(Decision("batch.accumulation", str(accumulation), reason))
    plan = BatchPlan(
        per_device=batch.micro_batch,
        accumulation=accumulation,
        world_size=1 if alone else count,
        eval_per_device=batch.eval_per_device or batch.micro_batch,
        devices=count if alone else 1,
    )
    reason = f"{batch.micro_batch} per device x {accumulation} accumulated x {count} {unit}"
    decisions.append(Decision("samples per step", str(plan.samples_per_step), reason))
    return plan


def batch_of(config: Config, batch: BatchPlan, num_samples: int) -> Fix:
    """Return overrides for the largest batch that the samples can fill."""
    count = batch.world_size * batch.devices
    if whole := num_samples // (batch.per_device * count):
        if config.batch.target is None:
            return Fix(f"batch.accumulation={whole}")
        return Fix(f"batch.target={whole * batch.per_device * count}")
    is_set = [k for k in ("accumulation", "target") if getattr(config.batch, k) is not None]
    sizes = [f"batch.per_device={max(1, num_samples // count)}"]
    if num_samples < count:
        sizes.append(f"distributed.num_processes={num_samples}")
    return Fix(*sizes, *(f"batch.{key}=null" for key in is_set))
