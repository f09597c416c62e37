"""Examination of own code before a run is planned, in the tracing process."""

import hashlib
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from eke.common.errors import EkeError, Fix, Problem
from eke.common.text import first_line
from eke.config.parts import Part, own_parts
from eke.config.schema import Config, CustomModel
from eke.plan.own_code import (
    Code,
    Found,
    OwnFacts,
    check_arguments,
    code_store,
    load_part,
    named_errors,
    serve_code,
    target_key,
    where_raised,
)
from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.batches.sampler import evenly_spaced
from eke.training.custom import find_part, refuse
from eke.training.custom.build import build_own_model, build_own_schedule
from eke.training.custom.callbacks import build_callback
from eke.training.custom.metrics import build_metric
from eke.training.custom.outputs import OwnLoss, has_own_loss
from eke.training.custom.samples import OwnSamples, call_data, collator_of
from eke.training.model.checkpointing import find_layers

_MEMORY_BYTES = 8 * 2**30
"""Memory that own code may allocate before a run is planned."""

_HASHED = 64
"""Samples of each split whose content is part of a run's identity."""


def examine(config: Config, code: Code) -> OwnFacts:
    """Return sizes of the model and the data set, or all problems of the named code."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # own code must not use a GPU that a run has
    serve_code(code, code_store(code))
    problems: list[Problem] = []
    facts = OwnFacts()
    with _limited_memory():
        for part in own_parts(config):
            try:
                target = load_part(part)
                problems += check_arguments(target, part, _given(part, target))
            except EkeError as error:
                problems.append(_problem(error, part))
        if not problems:
            first = own_parts(config)[0]
            try:
                facts = _measure(config)
            except EkeError as error:
                problems.append(_problem(error, first))
            except Exception as error:  # of own code, which may raise any
                said = f"{type(error).__name__}: {first_line(error)}"
                why = f"{said} ({where_raised(error) or 'in a library'})"
                if isinstance(error, MemoryError) or "can't allocate memory" in why:
                    why = f"allocates more than {_MEMORY_BYTES >> 30} GiB before a run is planned"
                problems.append(Problem(target_key(first), first.target, why, id="own_error"))
    return replace(facts, problems=[Found.of(problem) for problem in problems])


@contextmanager
def _limited_memory() -> Iterator[None]:
    held = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(held[1] if held else 0) * 1024 + _MEMORY_BYTES
    if hard not in (resource.RLIM_INFINITY, -1):
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _given(part: Part, target: Any) -> tuple[str, ...]:
    """Return the parameters that eke fills in, those by position as numbers."""
    group = part.key.partition(".")[0]
    if group == "metrics":
        return () if isinstance(target, type) else ("0", "1")
    known = {"optimizer": ("0", "lr"), "schedule": ("0", "1"), "loss": ("0", "1"),
             "data": ("split",), "data.collate": ("0",), "loss.per": ("0",)}  # fmt: skip
    return known.get(part.key, ())


_SAID = re.compile(r"([\w.]+)(?: = (\S+))?: (.*)", re.DOTALL)


def _problem(error: EkeError, part: Part) -> Problem:
    """Return an error about own code as a problem, with the key that its text names."""
    text, _, fix = str(error).partition("\n  -> ")
    if "can't allocate memory" in text:
        text, fix = f"allocates more than {_MEMORY_BYTES >> 30} GiB before a run is planned", ""
    found = _SAID.fullmatch(text)
    if (found and "." in found[1]) or text.startswith("loss = "):
        key, value, why = cast(re.Match[str], found).groups()
    else:
        part = getattr(error, "part", part)
        key, value, why = target_key(part), part.target, text
    typed = re.match(r"[\w.]+=\S+$", fix)
    if typed and not found:
        key, value = fix.split("=")
    return Problem(key, value or "", why, Fix(fix) if typed else Fix(remark=fix), "own_error")


def _measure(config: Config) -> OwnFacts:
    """Build the model without weights, read samples, and pass one micro-batch through both."""
    # What the builders read of a plan, which can only be made from these facts.
    plan = cast(Plan, SimpleNamespace(
        config=config, targets=config.targets, steps=SimpleNamespace(total=1),
        compute=SimpleNamespace(weights="float32", frozen="float32"),
    ))  # fmt: skip
    _build_others(plan)
    facts, batch = OwnFacts(), None
    if part := find_part(config, "data"):
        facts, batch = _measure_data(plan, part)
    if not isinstance(config.model, CustomModel):
        return facts
    model = build_own_model(plan, torch.device("meta"))
    layers = find_layers(model)
    facts = replace(
        facts,
        shapes=[list(p.shape) for p in model.parameters()],
        layers=sorted({type(layer).__name__ for layer in layers}),
        num_layers=len(layers),
    )
    if batch is None:
        ids = torch.zeros(1, config.data.seq_len, dtype=torch.int64)
        batch = MicroBatch({"input_ids": ids}, ids, 1, ids.numel(), ids.numel())
    return replace(facts, flops_per_sample=_flops(plan, model, batch))


def _build_others(plan: Plan) -> None:
    """Build metrics, callbacks and the schedule. Raises RunError: One is none."""
    for part in own_parts(plan.config):
        group, _, name = part.key.partition(".")
        if group == "metrics":
            build_metric(part, plan.config.metrics[name].inputs)
        elif group == "callbacks":
            build_callback(part)
        elif group == "schedule":
            build_own_schedule(plan)(0)


def _measure_data(plan: Plan, part: Part) -> tuple[OwnFacts, MicroBatch]:
    """Return the lengths and a hash of samples of both splits, and a micro-batch of two."""
    lengths, digest, batch = [], hashlib.sha256(), None
    for number in (0, 1):
        samples, collate = call_data(plan, part, bool(number))
        length = len(samples)
        own = OwnSamples(samples, np.arange(length), (plan.config.seed, number))
        with named_errors(part, "reading a sample of"):
            for index in evenly_spaced(length, _HASHED).tolist():
                digest.update(_content(own[0, index].value))
        if number == 0:
            if plan.config.data.repeatable and not _is_repeatable(own):  # type: ignore[attr-defined]  # of CustomData
                why = "sample 0 differs when it is read twice with the same random seeds"
                raise refuse(part, why, "data.repeatable=false")
            batch = collator_of(plan, part, collate)([own[0, n] for n in range(min(2, length))])
        lengths.append(length)
    assert batch is not None, "a data set is not empty"
    facts = OwnFacts(
        train_length=lengths[0], eval_length=lengths[1], samples=digest.hexdigest()[:16]
    )
    return facts, batch


def _is_repeatable(samples: OwnSamples) -> bool:
    first, second = (_content(samples[0, 0].value) for _ in range(2))
    return first == second


def _content(value: Any) -> bytes:
    """Return the bytes of a sample: of its tensors and arrays, and the text of other values."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {[*leaf.shape]}".encode())
            found.update(leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            found.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        elif " object at 0x" not in repr(leaf):  # an address differs between processes
            found.update(repr(leaf).encode())
    return found.digest()


def _flops(plan: Plan, model: nn.Module, batch: MicroBatch) -> int | None:
    """Return the FLOPs of a training step per sample, None if it does not run without values.

    Raises RunError: The output has no loss, or the model does not accept the batch.
    """
    meta = torch.device("meta")
    moved = batch.map(lambda tensor: tensor.to(meta))
    causal: list[int] = []
    attention = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("is_causal") or (len(args) > 3 and args[3]):
            causal.append(query.numel() * key.shape[-2])
        return attention(query, key, *args, **kwargs)

    buffers = {name: buffer.to(meta) for name, buffer in model.named_buffers()}
    # Code that needs values raises any of these on meta. If it is wrong, its first step says so.
    with suppress(RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        # On fake CPU tensors attention counts as 0. On meta it is two products.
        counter = FlopCounterMode(display=False)
        with counter, patch.object(F, "scaled_dot_product_attention", watched), meta:

            def run(*args: Any, **kwargs: Any) -> Any:
                state = {**dict(model.named_parameters()), **buffers}
                return torch.func.functional_call(model, state, args, kwargs)

            if has_own_loss(plan):
                loss = OwnLoss(plan, model)(run, moved)
            else:
                output = run(moved.inputs["input_ids"])
                loss = torch.stack([t.float().sum() for t in tree_leaves(output)]).sum()
            loss.backward()  # type: ignore[no-untyped-call]  # torch 2.13
        # Half of each causal score is masked: two products forward, four backward.
        return (counter.get_total_flops() - 6 * sum(causal)) // batch.num_samples
    return None
