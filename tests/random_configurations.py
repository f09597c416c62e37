"""Random command lines over every group and key there is: mostly runnable, at times impossible.

Sizes are always typed and tiny; every other key is typed with some chance. Values lie at the edges
of their limits (a decay of 1, a warm-up over the whole run) as often as in the middle; those that
are impossible by themselves (an odd head, a dropout of 1) are drawn now and then, so that most of
what is refused is refused for a combination.
"""

from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from random import Random
from typing import Any

from eke.config.compose.catalogue import FIXED_FIELDS, Catalogue, Field, make_catalogue
from eke.config.schema import VARIANTS, Sweep
from eke.config.schema.resources import LaunchKeys, Resources, Slurm
from eke.models.families import FAMILIES

Draw = Callable[[Random], Any]

SELDOM = 60


def one_of(*values: Any) -> Draw:
    """Each value as likely as its share of the list."""
    return lambda rng: rng.choice(values)


def seldom(*values: Any, beside: tuple[Any, ...]) -> Draw:
    """Once in `SELDOM` draws one of `values`, which hardly anything goes with; else one beside."""
    return lambda rng: rng.choice(values if rng.random() < 1 / SELDOM else beside)


def log_uniform(low: float, high: float) -> Draw:
    """A positive number whose order of magnitude is uniform."""
    return lambda rng: f"{low * (high / low) ** rng.random():.3g}"


ALWAYS: dict[str, Draw] = {
    "model.hidden_size": seldom(36, beside=(*[32] * 6, 48, 64)),
    "model.num_hidden_layers": one_of(1, 2, 2),
    "model.num_attention_heads": seldom(5, beside=(1, 2, 4)),
    "model.intermediate_size": one_of(64, 33, 1),
    "model.vocab_size": seldom(200, beside=(320, 320, 320, 264, 512)),
    "data.seq_len": one_of(4, 8, 16, 16, 31),
    "data.num_samples": seldom(5, beside=(16, 31, 40)),
    "data.num_eval_samples": one_of(1, 4, 5),
    "batch.per_device": one_of(1, 2, 2, 3, 4, 4),
}
"""Keys that are typed in every command: they keep a step in the milliseconds."""

FAMILY_SIZES: dict[str, dict[str, Draw]] = {
    "llama": {
        "model.num_key_value_heads": seldom(2, 3, beside=("null", 1)),
        "model.head_dim": seldom(7, beside=("null", "null", 8)),
    },
    "mixtral": {
        "model.num_key_value_heads": one_of("null", 1),
        "model.head_dim": one_of("null", 8),
        "model.intermediate_size": seldom(33, 1, beside=(64, 64, 8)),
        "model.num_local_experts": seldom(1, beside=(2, 2, 4)),
        "model.num_experts_per_tok": one_of(1, 2),
    },
    "t5": {
        "model.head_dim": one_of("null", 8, 7),
        "model.num_decoder_layers": one_of("null", 1, 3),
    },
    "bert": {},
    "gpt2": {},
}
"""Keys that are typed in every command of a family: its large options set them to large values."""

SOMETIMES: dict[str, Draw] = {
    "model.dropout": seldom(1, beside=(0, 0.1, 0.5, 0.9)),
    "model.max_position_embeddings": one_of(31, 64, 128, 16),
    "model.type_vocab_size": one_of(1, 2, 3),
    "model.rope_theta": one_of(1, 100, 5e5),
    "model.rope_scaling_factor": one_of("null", 1, 32),
    "model.rms_norm_eps": one_of(0, 1e-6, 1e-3),
    "task.router_loss": one_of("auto", "off", 0.1),
    "task.target_len": one_of("null", 2, 9),
    "task.num_labels": one_of(2, 3, 7),
    "task.labels": one_of("[]", "[a,b]", "[a,b,c]"),
    "data.multi_hot": one_of("null", "true", "false"),
    "task.mask_frac": one_of(0.01, 0.15, 0.99),
    "data.eval_frac": one_of(0.1, 0.5, 0.9),
    "data.pattern": one_of("'*.txt'", "'*'"),
    "data.packing": one_of("off", "off", "on", "padding_free"),
    "data.min_len": one_of("null", 2, 4, 12),
    "data.min_token": one_of(8, 100, 199, 8, 100, 0),
    "data.max_token": one_of(30000, 250, 120),
    "data.median_len": one_of("null", 2, 7),
    "data.sigma": one_of(0.01, 0.6, 5),
    "data.pad_to_multiple_of": one_of("null", 2, 8, 3),
    "data.max_bad_frac": one_of(0.01, 1),
    "data.shuffle_buffer": one_of(1000, 0, 3),
    "data.data_seed": one_of(0, 1, 2**40),
    "batch.accumulation": one_of("null", 1, 2, 3),
    "batch.target": one_of("null", "null", 4, 12),
    "batch.eval_per_device": one_of("null", 1, 3),
    "optimizer.lr": log_uniform(1e-5, 1e-2),
    "optimizer.weight_decay": one_of(0, 0.01, 1),
    "optimizer.implementation": seldom("apex", beside=("auto", "fused", "foreach", "forloop")),
    "optimizer.momentum": seldom(1, beside=(0, 0.5, 0.9)),
    "optimizer.clip_threshold": log_uniform(0.1, 10),
    "optimizer.decay_rate": one_of(-0.8, -0.5, -1, 0),
    "optimizer.eps1": one_of(1e-30, 1e-12),
    "optimizer.beta1": seldom(1, beside=(0, 0.5, 0.9)),
    "optimizer.beta2": seldom(1, beside=(0, 0.9, 0.999)),
    "optimizer.eps": one_of(1e-8, 1e-3),
    "optimizer.min_8bit_size": one_of(0, 1, 1000, 4096, 10**9),
    "optimizer.ns_steps": one_of(1, 5, 9),
    "optimizer.adamw_lr": one_of("null", 1e-3, 1e-5),
    "optimizer.average_power": one_of(0, 1, 3),
    "optimizer.lr_power": one_of(0, 2),
    "optimizer.rank": one_of("null", 1, 4, 16, 500),
    "optimizer.update_proj_gap": one_of(1, 2, 200),
    "optimizer.scale": one_of(0.25, 1, 8),
    "optimizer.block_size": one_of(1, 64, 128, 256, 100, 4096),
    "schedule.warmup_steps": one_of("null", 0, 1, 1, 2, 7),
    "schedule.warmup_frac": one_of(0, 0.05, 0.5, 1),
    "schedule.final_frac": one_of(0, 0.1, 1),
    "schedule.decay_frac": one_of(0, 0.2, 1),
    "distributed.num_processes": one_of(1, 1, 1, 1, 1, 1, 1, 2),
    "dataloader.workers": one_of(0, 0, 0, 0, 0, 1),
    "dataloader.prefetch": one_of(*["null"] * 9, 1),
    "dataloader.persistent": one_of(*["false"] * 9, "true"),
    "memory.optimizer_in_backward": one_of(*["false"] * 9, "true"),
    "memory.every_n": one_of(1, 1, 2, 5),
    "memory.empty_cache_every": one_of("null", "null", 1, 2),
    "attention.backend": one_of(*["auto", "math", "flash"] * 6, "mem_efficient", "cudnn"),
    "precision.compute": one_of(*["bfloat16"] * 3, "float32", "float16"),
    "precision.weights": one_of(*["float32"] * 5, "bfloat16"),
    "precision.casts": one_of(*["per_use"] * 5, "per_step"),
    "precision.float8": one_of(*["off"] * 5, "tensorwise", "rowwise"),
    "precision.tf32": seldom("on", beside=("auto", "off")),
    "train.max_grad_norm": one_of("null", 1.0, 0.01, 100),
    "train.record_grad_norm": seldom("false", beside=("true",)),
    "train.log_every": one_of(1, 2, 10),
    "train.eval_every": one_of("null", 1, 2),
    "train.early_stop_patience": one_of("null", 1, 2),
    "train.keep_best": one_of("null", "loss", "accuracy"),
    "train.checkpoint_every": one_of("null", "null", 1, 2),
    "train.save_on_signal": one_of("true", "false"),
    "train.keep_checkpoints": one_of(1, 2),
    "train.timing_warmup_steps": one_of(2, 3),
    "peft.target_modules": one_of("null", "null", "[dense,q_proj,c_attn,q]", "[q_proj,v_proj]"),
    "peft.r": one_of(1, 4, 64),
    "peft.alpha": one_of(1, 32.5),
    "peft.dropout": one_of(0, 0.1, 0.9),
    "peft.fused": one_of("false", "true"),
    "repeat": one_of(0, 1),
    "seed": one_of(0, 1, 2**32 - 1),
}
"""Keys that are typed now and then, and never with a value of another type."""

LENGTH: dict[str, Draw] = {"train.steps": one_of(1, 2, 3), "train.epochs": one_of(0.2, 0.5)}
"""One of these is typed, now and then both."""

LEFT_OUT = {
    **{f"launcher.{each.name}": "of a sweep" for each in fields(LaunchKeys)},
    **{f"resources.{each.name}": "of a cluster" for each in fields(Resources)},
    **{f"slurm.{each.name}": "of a cluster" for each in fields(Slurm)},
    **{f"sweep.{each.name}": "of a sweep" for each in fields(Sweep)},
    "recipe.horizon": "of what a recipe chooses: tests/unit/tuning/recipes",
    "distributed.num_nodes": "of a cluster",
    "distributed.replicas": "tests/equivalence/test_ranks.py: two processes have one copy",
    "train.resume": "tests/unit/workflows/test_resume.py",
    "hardware.network_gbit_per_s": "between machines",
    "distributed.timeout_s": "a time nobody waits for",
    "distributed.deepspeed_config": "tests/unit/plan/test_ds_config.py",
    "model.name_or_path": "checkpoints have tests of their own",
    "model.revision": "checkpoints have tests of their own",
    "model.content": "filled in from a checkpoint",
    "model.model_type": "filled in from a checkpoint",
    "model.label_names": "filled in from a checkpoint",
    "model.supports_sdpa": "filled in from a checkpoint",
    "model.supports_flash_attn": "filled in from a checkpoint",
    "model.supports_flex_attn": "filled in from a checkpoint",
    "model.router_loss": "filled in from a checkpoint",
    "model.num_parameters": "filled in from a checkpoint",
    "model.num_frozen_parameters": "filled in from a checkpoint",
    "model.freeze": "the names depend on the model; tests/equivalence/test_freeze.py",
    "data.max_row_bytes": "tests/unit/data/preparation",
    "data.sources": "data=mix is never drawn",
    "data.path": "typed with data=text and data=jsonl, csv, parquet",
    "data.eval_path": "a path",
    "data.name": "typed with data=hub",
    "data.config_name": "tests/unit/data/preparation",
    "data.split": "tests/unit/data/preparation",
    "data.eval_split": "tests/unit/data/preparation",
    "data.revision": "tests/unit/data/preparation",
    "data.text": "the files made for these runs have the default's columns",
    "data.text_pair": "the files made for these runs have the default's columns",
    "task.problem": "these files have single classes; tests/equivalence/test_problem_types.py",
    "data.label": "the files made for these runs have the default's columns",
    "data.prompt": "typed with task=seq2seq_lm",
    "data.response": "typed with task=seq2seq_lm",
    "data.separator": "tests/unit/data/preparation/test_frames.py",
    "data.tokenizer": "tests/unit/data/preparation",
    **dict.fromkeys(
        ("data.messages", "data.chat_template", "data.train_on", "data.bad_rows"),
        "data=chat is never drawn",
    ),
    "tracker.mode": "the tracker has tests of its own",
    "tracker.project": "the tracker has tests of its own",
    "tracker.entity": "the tracker has tests of its own",
    "tracker.group": "the tracker has tests of its own",
    "tracker.uri": "the tracker has tests of its own",
    "paths.runs": "a path",
    **dict.fromkeys(
        (
            "offload.path",
            "offload.weights",
            "offload.piece_numbers",
            "offload.block_bytes",
            "offload.queue_depth",
            "offload.threads",
        ),
        "offload=nvme is never drawn",
    ),
    "trainer.extra": "tests/unit/rules/test_trainer_arguments.py",
    "rerun": "no part of a training",
    "ignore_forecast": "no part of a training",
    "plan_only": "no part of a training",
    **{f"{section}.{name}": "an option's own" for section in ("model",) for name in FIXED_FIELDS},
}
"""Keys that are never drawn, and why."""

FIXED_GROUPS = {"tracker": "none", "hardware": "cpu", "slurm": "default", "sweep": "none",
                "loss": "auto", "metrics": "none", "callbacks": "none"}  # fmt: skip

RARE_OPTIONS = {
    "python_source": 0.06,  # reads the whole standard library
    "jsonl": 0.04,  # prepares tokens in a process of its own
    "csv": 0.02,
    "parquet": 0.02,
    "hub": 0.02,
    "inductor": 0.003,  # compiles C++ for half a minute
    "aot_eager": 0.03,
    "optimizer_in_backward": 0.03,  # refused under clipping, which is the default
    "max_savings": 0.03,
    "flash2": 0.02,  # refused on a CPU, like the next two
    "flash3": 0.02,
    "flex": 0.02,
    "cudagraphs": 0.02,  # refused on a CPU
    "eager": 0.04,
    "auto": 0.1,  # of the group batch: it chooses nearly always the whole target
    "tf32": 0.05,  # refused on a CPU
    "dp": 0.02,  # refused on a CPU
    "fsdp": 0.1,
    "fp8": 0.05,  # emulated: slow
    "adamw_apex_fused": 0.02,  # refused on a CPU
    "adamw_torchao_8bit": 0.002,  # compiles C++ for half a minute
    "adamw_torchao_4bit": 0.002,
    "adamw_bf16_sr": 0.002,
    "workers": 0.04,  # starts processes
    "liger": 0.02,  # refused on a CPU
    "zero1": 0.03,  # DeepSpeed takes seconds to start
    "zero2": 0.03,
    "zero3": 0.03,
    "optimizer_cpu": 0.02,  # compiles C++ at its first use
    "params_cpu": 0.02,
    "nvme": 0.0,  # these models are too small for a file; tests/equivalence/test_nvme.py
}
"""Options with a smaller chance than their share, by option."""

NEVER = dict.fromkeys(
    ("chat", "chat_hub"),
    "needs a tokenizer with a template; tests/unit/data/preparation/test_chat.py",
) | {
    "mix": "has no sources by itself; tests/equivalence/test_mix.py",
    "custom": "names own code; tests/e2e/test_own_code.py",
}
"""Options that are never drawn, and why."""

TECHNIQUES = (
    "precision", "optimizer", "memory", "attention", "compile", "kernels", "distributed",
    "offload", "dataloader", "peft", "engine",
)  # fmt: skip
USUAL = 0.78
"""Chance of a technique group to have its default: two or three of eleven are something else."""

CHANCE = 0.055
"""Of a key to be typed at all."""

CATALOGUE = make_catalogue()


def draw_command(rng: Random, text: str) -> tuple[str, ...]:
    """Overrides of one command; `text` is a folder of text, a subfolder per class."""
    groups = _groups(rng, CATALOGUE)
    typed = [f"{group}={option}" for group, option in groups.items()]
    if groups["data"] in ("text", "jsonl", "csv", "parquet"):
        typed.append(f"data.path={text}")
    if groups["data"] == "hub":
        typed.append(f"data.name={text}/hub")
    if groups["task"] == "seq2seq_lm" and groups["data"] in ("jsonl", "csv", "parquet", "hub"):
        typed += ["data.prompt=text", "data.response=more"]
    family = _family(groups["model"])
    always = dict(ALWAYS)
    if groups.get("batch") == "auto" and rng.random() >= 1 / SELDOM:
        del always["batch.per_device"]  # what it would choose
    keys = {**always, **FAMILY_SIZES[family], **_length(rng)}
    typed += [f"{key}={draw(rng)}" for key, draw in keys.items()]
    for key, draw in _other_keys().items():
        if key not in keys and has_key(groups, key) and rng.random() < CHANCE:
            typed.append(f"{key}={draw(rng)}")
    return tuple(typed)


def has_key(groups: dict[str, str], key: str) -> bool:
    """Whether the drawn options have this key."""
    section, _, name = key.rpartition(".")
    return section not in groups or groups[section] in CATALOGUE.options_with(section, name)


def _groups(rng: Random, catalogue: Catalogue) -> dict[str, str]:
    """An option for most groups, and for all with keys of their own, lest a preset chooses there.

    The task fits the model nineteen times out of twenty.
    """
    groups = {}
    for group, options in catalogue.options.items():
        if group in FIXED_GROUPS:
            groups[group] = FIXED_GROUPS[group]
        elif group == "model":
            groups[group] = rng.choice([o for o in options if o not in ("pretrained", "custom")])
        elif group in TECHNIQUES and rng.random() < USUAL:
            groups[group] = catalogue.defaults[group]
        elif group in VARIANTS or rng.random() < 0.7:
            groups[group] = _option(rng, group, [o for o in options if o not in NEVER])
    if rng.random() < 0.95:
        groups["task"] = rng.choice(FAMILIES[_family(groups["model"])].tasks)
    return groups


def _option(rng: Random, group: str, options: list[str]) -> str:
    if group == "attention":  # the others are refused on a CPU
        return rng.choice([*["eager", "sdpa"] * 15, "flash2", "flash3", "flex"])
    rare = {o: RARE_OPTIONS[o] for o in options if o in RARE_OPTIONS}
    for option, chance in rare.items():
        if rng.random() < chance:
            return option
    return rng.choice([option for option in options if option not in rare])


def _family(model: str) -> str:
    kind = CATALOGUE.schema_class("model", model).__name__
    return kind.removesuffix("Model").lower()


def _length(rng: Random) -> dict[str, Draw]:
    if rng.random() < 1 / SELDOM / 2:
        return LENGTH
    key = rng.choice(["train.steps", "train.steps", "train.epochs"])
    # An experiment may set the other one.
    other = next(name for name in LENGTH if name != key)
    return {key: LENGTH[key], other: one_of("null")}


def _other_keys() -> dict[str, Draw]:
    """SOMETIMES, and every key whose type says all its values."""
    found = {}
    for key, field in CATALOGUE.keys.items():
        if key in LEFT_OUT or key.rpartition(".")[2] in FIXED_FIELDS:
            continue
        if draw := SOMETIMES.get(key) or _by_type(field):
            found[key] = draw
    return found


def _by_type(field: Field) -> Draw | None:
    if field.kind is bool:
        return one_of("true", "false")
    return one_of(*field.kind.__members__) if issubclass(field.kind, Enum) else None


def undrawn_keys() -> set[str]:
    """Keys that no command would ever have, though nothing says why."""
    drawn = {*ALWAYS, *LENGTH, *_other_keys()}
    drawn |= {key for keys in FAMILY_SIZES.values() for key in keys}
    fixed = {key for key in CATALOGUE.keys if key.rpartition(".")[2] in FIXED_FIELDS}
    # Own code: tests/e2e/test_own_code.py, tests/unit/config/compose/test_own_code.py.
    own = {
        key
        for key in CATALOGUE.keys
        if "." in key and set(CATALOGUE.options_with(*key.split(".", 1))) == {"custom"}
    }
    own |= {"code.path", "loss.per", "loss.couples_batch", "metrics", "callbacks"}
    return set(CATALOGUE.keys) - drawn - set(LEFT_OUT) - fixed - own
