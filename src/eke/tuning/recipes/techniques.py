"""Techniques that save memory, with what each costs and who has measured it."""

from eke.common import published_slowdowns as published
from eke.config.schema import Compute, MaskedLM
from eke.models.sizes import predicted_frac
from eke.tuning.recipes.combination_search import Axis, Way
from eke.tuning.recipes.question import Candidate, Situation, Wish

SELECTIVE = Way(
    ("memory=checkpointing_selective",),
    published.SELECTIVE.slowdown,
    f"what is cheap is computed twice, 7 % more time ({published.SELECTIVE.source})",
)
FULL = Way(
    ("memory=checkpointing",),
    published.CHECKPOINTING.slowdown,
    f"each layer's forward pass twice, {published.CHECKPOINTING.source}",
)
ADAFACTOR = Way(
    ("optimizer=adafactor",),
    published.ADAFACTOR.slowdown,
    f"sums of rows and columns instead of two moments; {published.ADAFACTOR.source}",
    keeps=False,
)
ADAMW_8BIT = Way(
    ("optimizer=adamw_8bit",),
    published.ADAM_8BIT_TORCHAO.slowdown,
    f"moments in 8 bits; {published.ADAM_8BIT_TORCHAO.source}",
    keeps=False,
)
TORCHAO_8BIT = Way(
    ("optimizer=adamw_torchao_8bit",),
    published.ADAM_8BIT_TORCHAO.slowdown,
    f"moments in 8 bits, embeddings included; {published.ADAM_8BIT_TORCHAO.source}",
    keeps=False,
)
ROUNDED_AT_RANDOM = Way(
    ("precision=bf16_pure", "optimizer=adamw_bf16_sr"),
    1.0,
    "weights, gradients and moments in bfloat16, rounded at random, so that small updates are "
    f"right on average ({published.TORCHAO})",
    keeps=False,
)
IN_BACKWARD = Way(
    ("memory=optimizer_in_backward",),
    None,
    "each weight is updated as soon as its gradient is there: no others are kept "
    "(arXiv:2306.09782)",
)
RECOMPUTED_IN_BACKWARD = Way(
    ("memory=checkpointing", "memory.optimizer_in_backward=true"),
    None,
    "layers computed twice, weights updated in the backward pass (arXiv:2306.09782)",
)
STATES_ON_HOST = Way(
    ("distributed=zero2", "distributed.num_processes=1", "offload=optimizer_cpu"),
    published.STATES_ON_HOST.slowdown,
    f"states in host memory, updated there; {published.STATES_ON_HOST.source}",
)
WEIGHTS_ON_HOST = Way(
    ("distributed=zero3", "distributed.num_processes=1", "offload=params_cpu"),
    None,
    "states and weights in host memory (arXiv:2101.06840); how much slower depends on the host",
)

RECOMPUTATION = Axis(("memory", "memory.checkpointing"), (SELECTIVE, FULL))
WHERE = Axis(
    ("distributed", "distributed.num_processes", "offload"), (STATES_ON_HOST, WEIGHTS_ON_HOST)
)


def computed_again(situation: Situation) -> float:
    """Share of a step's operations that the fused loss adds: in 16 bits the projection once more.

    Forward and backward are three products of each weight, and this is one of the vocabulary's.
    """
    model = situation.config.model
    if situation.config.precision.compute is Compute.float32:
        return 0.0
    whole = 3 * max(1, situation.plan.size.num_matmul_parameters)
    share = predicted_frac(situation.config)
    return share * model.vocab_size * (model.hidden_size or 0) / whole


def sparse(situation: Situation) -> Wish | None:
    """No logits where nothing is to be predicted."""
    config = situation.config
    decides = ("kernels", "kernels.sparse_prediction")
    if isinstance(config.task, MaskedLM):
        why = f"{1 - config.task.mask_frac:.0%} of the positions have no label: no logits for them"
    elif config.task.option == "causal_lm" and getattr(config.data, "prompt", None) is not None:
        why = "a prompt's positions have no label: no logits for them"
    else:
        return None
    return Wish(decides, (Candidate(("kernels=sparse_prediction",), why),))


def fused_loss(situation: Situation) -> tuple[str, ...]:
    """What is typed for it beside what has been chosen of the same group."""
    if situation.config.kernels.sparse_prediction:
        return "kernels=sparse_prediction", "kernels.fused_linear_cross_entropy=true"
    return ("kernels=fused_linear_cross_entropy",)


def loss(situation: Situation) -> Axis:
    """The vocabulary's projection and the loss as one operation."""
    more = computed_again(situation)
    why = f"never all logits at once; {more:.0%} more operations"
    way = Way(fused_loss(situation), 1 + more, why)
    return Axis(("kernels", "kernels.fused_linear_cross_entropy"), (way,))
