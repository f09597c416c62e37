"""Every pair of options of two groups, in as few configurations as a greedy choice finds.

Random commands seldom draw two rare options together: `memory=checkpointing_selective` with
`distributed=zero3` once in two thousand. What two options do to each other is most of what can go
wrong between options (Kuhn et al. 2004, doi:10.1109/TSE.2004.24: pairs trigger most failures).
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from random import Random

from random_configurations import CATALOGUE, TECHNIQUES
from support import TINY

Value = tuple[str, ...]
"""Overrides that are typed together."""

Command = tuple[str, ...]

Mend = Callable[[Command], Command]
"""A command -> the one that passes the rules once fixes are typed."""

Pair = frozenset[Value]

SIZES: Command = (
    *TINY,
    "data=synthetic",
    "data.seq_len=16",
    "data.num_samples=13",  # the last step of an epoch has fewer
    "data.num_eval_samples=3",
    "data.lengths=lognormal",
    "batch.per_device=2",
    "train.log_every=1",
    "train.steps=4",
)
"""What every command has: three full steps and an uneven one."""

FACTORS: dict[str, tuple[Value, ...]] = {
    "model": (
        ("model=tiny", "task=causal_lm"),
        ("model=tiny_bert", "task=masked_lm"),
        ("model=tiny_bert", "task=sequence_classification"),
        ("model=tiny_gpt2", "task=causal_lm"),
        ("model=tiny_t5", "task=seq2seq_lm"),
        ("model=tiny_moe", "task=causal_lm"),
        ("model=tiny_qwen3", "task=causal_lm"),
    ),
    **{
        group: tuple(
            (f"{group}={option}",)
            for option in sorted(
                CATALOGUE.options[group], key=lambda o, g=group: o != CATALOGUE.defaults[g]
            )
        )
        for group in TECHNIQUES
    },
    "processes": (("distributed.num_processes=1",), ("distributed.num_processes=2",)),
    "packing": (("data.packing=off",), ("data.packing=on",), ("data.packing=padding_free",)),
    "accumulation": (("batch.accumulation=1",), ("batch.accumulation=3",)),
    "clipping": (("train.max_grad_norm=1.0",), ("train.max_grad_norm=null",)),
    "saving": (("train.checkpoint_every=null",), ("train.checkpoint_every=2",)),
    "evaluation": (("precision.evaluation=same",), ("precision.evaluation=bfloat16",)),
    "dropout": (("model.dropout=0.0",), ("model.dropout=0.1",)),
}
"""What is varied, and its values, the default first."""


class Covering:
    """Configurations that have every pair which the rules let through at least once."""

    def __init__(self, mend: Mend, rng: Random, factors: Mapping[str, tuple[Value, ...]]) -> None:
        self.mend = mend
        self.rng = rng
        self.factors = factors
        self.alone: list[Value] = []
        """Values that no fix leaves in place, whatever else there is: not for this machine."""
        self.refused: list[Pair] = []
        """Pairs of which every fix takes one away."""
        self.covered: set[Pair] = set()

    def __iter__(self) -> Iterator[Command]:
        """One command after the other."""
        self.alone = [v for v in self._values() if not self._holding(self._base(v), {v})]
        usable = {
            name: [value for value in values if value not in self.alone]
            for name, values in self.factors.items()
        }
        pairs = [
            frozenset((one, other))
            for (_, ones), (_, others) in combinations(usable.items(), 2)
            for one in ones
            for other in others
        ]
        self.rng.shuffle(pairs)
        for pair in pairs:
            if pair in self.covered:
                continue
            command = self._holding(self._base(*pair), pair)
            if command is None:
                self.refused.append(pair)
                continue
            command = self._extended(command, pair, usable)
            self.covered |= {frozenset(two) for two in combinations(self._held(command), 2)}
            yield command

    def _values(self) -> list[Value]:
        return [value for values in self.factors.values() for value in values]

    def _base(self, *chosen: Value) -> Command:
        """The defaults with these instead."""
        defaults = [values[0] for values in self.factors.values()]
        return typed(SIZES, *defaults, *chosen)

    def _holding(self, command: Command, values: set[Value] | Pair) -> Command | None:
        """The mended command, if these values are still in it."""
        mended = self.mend(command)
        return mended if all(set(v) <= set(mended) for v in values) else None

    def _held(self, command: Command) -> list[Value]:
        return [value for value in self._values() if set(value) <= set(command)]

    def _extended(self, command: Command, pair: Pair, usable: dict[str, list[Value]]) -> Command:
        """Other factors' values are put in as long as they add pairs and need no mending."""
        names = list(usable)
        self.rng.shuffle(names)
        for name in names:
            held = self._held(command)
            # What the pair needs, as a fix has typed it, stays.
            if any(value in held for value in usable[name][1:]) or pair & set(usable[name]):
                continue
            others = [value for value in held if value not in usable[name]]
            new = {
                v: sum(frozenset((v, o)) not in self.covered for o in others) for v in usable[name]
            }
            best = sorted(usable[name], key=lambda v: -new[v])
            for value in [v for v in best if new[v]][:3]:
                longer = typed(command, value)
                if self.mend(longer) == longer:
                    command = longer
                    break
        return command


def typed(command: Command, *values: Value) -> Command:
    """The command with these overrides, the last of a key alone."""
    words = [*command, *(word for value in values for word in value)]
    return tuple({word.split("=", 1)[0]: word for word in words}.values())
