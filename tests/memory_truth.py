"""Random small trainings, their predicted peaks, and what they really take on a CPU."""

import math
import multiprocessing
import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from support import REPO

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.plan.planner import Plan
from eke.workflows.planning import plan_for

MODELS = {
    "llama": ("model=tiny", ("causal_lm", "sequence_classification")),
    "bert": ("model=tiny_bert", ("masked_lm", "sequence_classification")),
    "gpt2": ("model=tiny_gpt2", ("causal_lm", "sequence_classification")),
    "t5": ("model=tiny_t5", ("seq2seq_lm", "sequence_classification")),
    "mixtral": ("model=tiny_moe", ("causal_lm",)),
}
"""Family -> its option and its tasks."""

PRECISIONS = (
    "precision=fp32", "precision=fp32", "precision=bf16", "precision=bf16", "precision=fp16",
    "precision=bf16_pure", "precision=bf16_pure precision.master=on",
    "precision=bf16 precision.casts=per_step",
)  # fmt: skip
OPTIMIZERS = (
    "adamw", "adamw_forloop", "adamw_foreach", "adamw_fused", "adamw_8bit", "adafactor", "lion",
    "lion_8bit", "sgd", "muon", "schedule_free", "apollo", "galore",
)  # fmt: skip
TECHNIQUES = (
    "", "", "", "memory=checkpointing", "memory=checkpointing memory.every_n=2",
    "memory=checkpointing_selective", "batch.accumulation=2", "batch.accumulation=3",
    "kernels=fused_linear_cross_entropy", "kernels=sparse_prediction",
    "peft=lora", "peft=dora", "peft=ia3",
    "memory=optimizer_in_backward train.max_grad_norm=null", "train.max_grad_norm=null",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training."""

    family: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """One training, predicted and measured; bytes."""

    case: Case
    predicted: int | None
    measured: int | None
    """None where the loss scaler skipped a step."""
    reason: str = ""
    """Why there is no prediction."""

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        assert self.predicted is not None, self.reason
        assert self.measured is not None, SKIPPED
        return self.predicted / self.measured - 1

    @property
    def is_known(self) -> bool:
        """Whether there is something to compare."""
        return self.predicted is not None and self.measured is not None

    def row(self) -> dict[str, Any]:
        """For a file of results."""
        found = {"family": self.case.family, "overrides": " ".join(self.case.overrides)}
        error = round(self.error, 6) if self.is_known else None
        return {**found, **{k: v for k, v in asdict(self).items() if k != "case"}, "error": error}


def draw(rng: Random, family: str) -> Case:
    """One configuration, possibly refused."""
    option, tasks = MODELS[family]
    heads = rng.choice((1, 2, 4))
    hidden = heads * rng.choice((16, 32, 48, 64))
    batch, accumulation = rng.randint(1, 6), 1
    technique = rng.choice(TECHNIQUES)
    if "accumulation" in technique:
        accumulation = int(technique[-1])
    size = [
        f"model.hidden_size={hidden}",
        f"model.num_attention_heads={heads}",
        f"model.num_hidden_layers={rng.randint(1, 5)}",
        f"model.intermediate_size={rng.choice((64, 100, 256, 500))}",
        f"model.vocab_size={rng.choice((320, 1000, 4096))}",
        f"model.dropout={rng.choice((0, 0.1))}",
    ]
    if family != "t5":  # which has no table of positions
        size += ["model.max_position_embeddings=256"]
    if family == "mixtral":
        size += [f"model.num_local_experts={rng.choice((2, 4, 8))}"]
    if family in ("llama", "mixtral") and heads > 1:
        size += [f"model.num_key_value_heads={rng.choice((1, heads))}"]
    rest = [
        f"task={rng.choice(tasks)}",
        f"data.seq_len={rng.choice((16, 48, 64, 100, 160))}",
        f"batch.per_device={batch}",
        f"data.num_samples={4 * batch * accumulation}",
        f"attention={rng.choice(('sdpa', 'eager'))}",
        f"optimizer={rng.choice(OPTIMIZERS)}",
        rng.choice(PRECISIONS),
        technique,
    ]
    words = " ".join([option, *size, *rest, *COMMON]).split()
    return Case(family, tuple(words))


COMMON = (
    "data=synthetic", "data.min_token=8", "data.num_eval_samples=2", "train.steps=2",
    "train.save_final=false", "tracker=none", "hardware=cpu",
)  # fmt: skip


def cases(seed: int, count: int) -> list[Case]:
    """So many that no rule refuses, the families in turns."""
    rng, found = Random(seed), []
    families = list(MODELS)
    for _ in range(20 * count):  # a family that is always refused must end this
        if len(found) == count:
            break
        case = draw(rng, families[len(found) % len(families)])
        try:
            plan_of(case)
        except ConfigError:
            continue
        found.append(case)
    assert len(found) == count, "the rules refuse nearly everything"
    return found


def plan_of(case: Case) -> Plan:
    """Its plan for this CPU."""
    return plan_for(compose(case.overrides), planning=True)


SKIPPED = "gradients overflowed float16: the loss scaler skipped a step"


def measured(case: Case, evaluates: bool = True) -> int:
    """Peak of the tensor allocator in the second step, in this process.

    Without evaluation, a compiler has a third less to do, and the number of rows is static.

    A process should measure once: PyTorch's profiler remembers addresses from one profile to the
    next, and counts them wrong where others have been given out in between.
    """
    from trained import steps_of, train_job

    skipped_evaluation = patch("eke.training.loop.loop.evaluate_at", lambda *_: None)
    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext() if evaluates else skipped_evaluation,
    ):
        job = train_job(plan_of(case), Path(folder) / "run")
        skipped = any(not math.isfinite(norm) for _, norm in steps_of(job).values())
    assert job.profiled_peak is not None
    if skipped and job.formats.scaler:
        raise RuntimeError(SKIPPED)  # the optimizer has not made its state in the step looked at
    return job.profiled_peak


def _put(queue: Any, case: Case, evaluates: bool) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    try:
        queue.put(measured(case, evaluates))
    except BaseException as error:
        queue.put(f"{type(error).__name__}: {error}")


def measured_apart(case: Case, evaluates: bool = True) -> int | None:
    """As `measured`, in a process of its own that begins where the imports are done.

    None where a step was skipped, so that what the second one took is no ordinary step's.

    Raises:
        RuntimeError: the training failed.
    """
    # The server gets no other word of where modules are, and then imports none beforehand.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO / "src"), str(REPO / "tests")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memory_truth", "trained", *LOADED])
    queue = context.SimpleQueue()
    process = context.Process(target=_put, args=(queue, case, evaluates))
    process.start()
    found = queue.get()
    process.join()
    if isinstance(found, str) and SKIPPED in found:
        return None
    if isinstance(found, str):
        raise RuntimeError(f"{' '.join(case.overrides)}: {found}")
    return int(found)


LOADED = (
    "torch", "eke.training.loop.attempt", "eke.training.loop.training_state",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert", "transformers.models.t5.modeling_t5",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.mixtral.modeling_mixtral",
    "bitsandbytes", "peft", "torch._inductor.compile_fx",
)  # fmt: skip


def step_peak(allocated: dict[str, int]) -> int:
    """What a run on a CPU measures: the highest sum in a training step."""
    return max(allocated[phase] for phase in ("forward", "backward", "optimizer"))
