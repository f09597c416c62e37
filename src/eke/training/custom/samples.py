"""Data sets of own code. Samples are functions of seed, epoch and index, also random ones."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from eke.config.parts import Part
from eke.config.schema import CustomData
from eke.data.sources import mix_seed
from eke.plan.own_code import call_part, load_part
from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.batches.sampler import evenly_spaced
from eke.training.batches.tasks import Key
from eke.training.custom import bind_part, describe_shapes, find_part, parameters_of, refuse
from eke.training.custom.outputs import Count, build_count

_SPLITS = ("train", "eval")


@contextmanager
def kept_random() -> Iterator[None]:
    """Restore the states of Python, NumPy and torch's CPU generator, except in loader processes."""
    if get_worker_info() is not None:  # nothing else draws there
        yield
        return
    default = torch.default_generator
    states = random.getstate(), np.random.get_state(), default.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        default.set_state(states[2])


def seed_all(*parts: int) -> None:
    """Seed the three generators of the host by several numbers."""
    seed = mix_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@dataclass(frozen=True)
class _Drawn:
    """Sample with its seeds."""

    seeds: tuple[int, ...]
    value: Any


@dataclass(frozen=True)
class OwnSamples:
    """Samples of one split by epoch and index."""

    samples: Any
    """Map-style data set."""
    chosen: np.ndarray
    """Numbers of the planned samples."""
    seeds: tuple[int, int]
    """Seed of the run and number of the split."""
    is_stream = False

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, key: Key) -> _Drawn:
        """Return a sample."""
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[_Drawn]:
        """Return the samples of a micro-batch. torch's DataLoader calls it if it exists."""
        drawn = []
        with kept_random():
            for epoch, index in keys:
                seeds = (*self.seeds, epoch, index)
                seed_all(*seeds)
                drawn.append(_Drawn(seeds, self.samples[int(self.chosen[index])]))
        return drawn

    def lengths(self) -> np.ndarray:
        """Return equal lengths, as own samples have no tokens."""
        return np.ones(len(self), int)


@dataclass(frozen=True)
class OwnCollator:
    """Collator of a micro-batch by a function of own code, or torch's."""

    part: Part
    """Part that errors name."""
    function: Callable[[list[Any]], Any]
    names: Sequence[str]
    count: Count

    def __call__(self, drawn: list[_Drawn]) -> MicroBatch:
        """Build a micro-batch. RunError: Its tensors differ in the number of samples."""
        values = [each.value for each in drawn]
        with kept_random():
            seed_all(*drawn[0].seeds, 1)  # a collator may draw, too, after the last sample
            try:
                made = self.function(values)
            except (RuntimeError, TypeError) as error:
                if self.function is not default_collate:
                    raise
                shapes = " and ".join(dict.fromkeys(map(describe_shapes, values)))
                why = f"torch cannot stack these samples: {shapes}"
                raise refuse(self.part, why, "data.collate=PATH, a function of a list") from error
        batch = self._named(made)
        tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
        sizes = {t.shape[0] if t.dim() else 0 for t in tree_leaves(batch) if isinstance(t, Tensor)}
        if len(sizes) != 1 or 0 in sizes:
            why = f"the first dimension is not the number of samples: {describe_shapes(batch)}"
            raise refuse(self.part, why, "data.collate=PATH, which returns tensors of equal rows")
        (rows,) = sizes
        count = self.count(tensors, rows)
        return MicroBatch(batch, None, rows, count, 0)

    def _named(self, made: Any) -> dict[str, Any]:
        if isinstance(made, Mapping):
            return {str(key): value for key, value in made.items()}
        if hasattr(made, "_asdict"):
            return dict(made._asdict())
        if hasattr(made, "__dataclass_fields__"):
            return dict(vars(made))
        items = list(made) if isinstance(made, tuple | list) else [made]
        names = [*self.names] or [str(number) for number in range(len(items))]
        if len(names) != len(items):
            why = f"a sample has {len(items)} items: {describe_shapes(made)}"
            raise refuse(self.part, why, f"data.keys with {len(items)} names")
        return dict(zip(names, items, strict=True))


def open_own(plan: Plan) -> tuple[OwnSamples, OwnSamples, OwnCollator]:
    """Open both splits of own data, and their collator. RunError: Fewer samples than planned."""
    part = cast(Part, find_part(plan.config, "data"))
    (train, given), (evaluation, _) = (call_data(plan, part, split) for split in (False, True))
    planned = plan.steps.num_train_samples, plan.steps.num_eval_samples
    splits = []
    for number, (samples, wanted) in enumerate(zip((train, evaluation), planned, strict=True)):
        if (found := len(samples)) < wanted:
            why = f"{_SPLITS[number]} has {found} samples, and {wanted} were planned"
            raise refuse(part, why, "the same command again")
        chosen = evenly_spaced(found, wanted)
        splits.append(OwnSamples(samples, chosen, (plan.config.seed, number)))
    return splits[0], splits[1], collator_of(plan, part, given)


def collator_of(plan: Plan, part: Part, given: Any) -> OwnCollator:
    """Return the collator of own data: `data.collate`, the `given` one, or torch's."""
    named = find_part(plan.config, "data.collate")
    function = (bind_part(named) if named else given) or default_collate
    names = cast(CustomData, plan.config.data).keys
    return OwnCollator(named or part, function, names, build_count(plan))


def call_data(plan: Plan, part: Part, evaluation: bool) -> tuple[Any, Any]:
    """Return the data set and the collator, None without one, of a split."""
    target, split = load_part(part), _SPLITS[evaluation]
    more: dict[str, Any] = {}
    if "split" in parameters_of(target) and "split" not in part.args:
        more = {"split": split}
    elif evaluation:
        own = cast(CustomData, plan.config.data).eval_args
        part = replace(part, args={**part.args, **own})
    with kept_random():
        seed_all(plan.config.seed, int(evaluation))
        made = call_part(part, **more)
    collate = None
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        made, collate = made
    if isinstance(made, DataLoader):
        why = "returned a DataLoader. eke loads batches itself"
        raise refuse(part, why, "return its data set, or (data set, collate function)")
    if isinstance(made, IterableDataset) or not hasattr(made, "__getitem__"):
        raise refuse(part, f"returned {type(made).__name__}, which has no samples by index")
    if not hasattr(made, "__len__") or not len(made):
        raise refuse(part, f"the split {split} is empty or has no length")
    return made, collate
