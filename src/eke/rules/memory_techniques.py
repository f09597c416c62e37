"""Whether the training state fits, by numbers, and what would make it fit: options tried in order.

A lower bound: activations come on top.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from eke.config.schema import FSDP, Adafactor, AdamW, Config, Lora, Offload, QLora, Weights
from eke.models.sizes import STAGE, StateBytes, describe, model_size, shared_state_bytes
from eke.rules.rule import Facts

ROOM = 1.05
"""Share of the state that is left for activations, at least: nothing trains on the last byte."""

SHARE_MORE = (
    ("zero2", "none"),
    ("zero3", "none"),
    ("zero2", "optimizer_cpu"),
    ("zero3", "optimizer_cpu"),
    ("zero3", "params_cpu"),
)
"""Options of `distributed` and `offload`, mildest first."""

Change = tuple[str, Config]
"""What is typed, with a remark behind three spaces, and the configuration with it."""


def copies(facts: Facts) -> int:
    """Processes that share the device's memory, each with a copy: a CPU's."""
    return facts.config.distributed.num_processes if facts.device.kind == "cpu" else 1


def in_one(facts: Facts) -> StateBytes:
    """What one process keeps in its device's memory; a CPU's is the host's."""
    return shared_state_bytes(facts.config, model_size(facts.config), facts.device.kind == "cpu")


def held_bytes(facts: Facts) -> int:
    """The most that weights, gradients and optimizer state take of one device's memory."""
    return in_one(facts).peak * copies(facts)


def first_that_fits(facts: Facts) -> str | None:
    """The override with which the state fits into the memory; None where none of them does."""
    memory = facts.device.memory_bytes or 0
    for changes in SAVERS:
        for typed, config in changes(facts):
            if held_bytes(replace(facts, config=config)) * ROOM <= memory:
                return typed
    return None


def _fewer_processes(facts: Facts) -> Iterator[Change]:
    config = facts.config
    for count in range(copies(facts) - 1, 0, -1):
        fewer = replace(config.distributed, num_processes=count)
        typed = "distributed=none" if count == 1 else f"distributed.num_processes={count}"
        yield typed, replace(config, distributed=fewer)


def _adafactor(facts: Facts) -> Iterator[Change]:
    """Not where the state is cut: Adafactor's factors are those of whole matrices."""
    config = facts.config
    cut = isinstance(config.distributed, FSDP) or config.distributed.option in STAGE
    if isinstance(config.optimizer, AdamW) and not cut:
        yield "optimizer=adafactor", replace(config, optimizer=Adafactor(option="adafactor"))


def _all_gpus(facts: Facts) -> Iterator[Change]:
    config, count = facts.config, facts.device.count
    contradicts = config.batch.target and config.batch.target % (config.batch.micro_batch * count)
    several = facts.device.kind == "cuda" and count > 1
    if several and not describe(config.optimizer).fails_on_parts and not contradicts:
        shared = replace(config, distributed=FSDP("fsdp", count))
        yield f"distributed=fsdp distributed.num_processes={count}", shared


def _more_sharing(facts: Facts) -> Iterator[Change]:
    config = facts.config
    if config.distributed.option not in STAGE:
        return
    for zero, offload in SHARE_MORE:
        changed = replace(
            config,
            distributed=replace(config.distributed, option=zero),
            offload=Offload(option=offload),
        )
        processes = f"distributed.num_processes={config.distributed.num_processes}"
        yield f"distributed={zero} {processes} offload={offload}", changed


def _adapters(facts: Facts) -> Iterator[Change]:
    """Not where DeepSpeed would round the adapters, too."""
    config = facts.config
    if config.distributed.option in STAGE and config.precision.weights is Weights.bfloat16:
        return
    if config.peft.option == "none":
        lora = replace(config, peft=Lora(option="lora"))
        yield "peft=lora   (trains adapters, the weights are frozen)", lora
    if config.peft.option != "qlora":
        kept = asdict(config.peft) if isinstance(config.peft, Lora) else {}
        qlora = replace(config, peft=QLora(**{**kept, "option": "qlora"}))
        yield "peft=qlora   (trains adapters, the weights are frozen and kept in 4 bits)", qlora


SAVERS: tuple[Callable[[Facts], Iterator[Change]], ...] = (
    _fewer_processes,
    _more_sharing,
    _all_gpus,
    _adafactor,
    _adapters,
)
"""Cheapest change first: the same training, then another optimizer, then fewer weights trained."""
