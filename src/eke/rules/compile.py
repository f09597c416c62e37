"""Rules about torch.compile and fused kernels."""

from collections.abc import Callable

from eke.common.errors import Fix
from eke.config.schema import CompileMode, Conversations, Mix, Packing, TextColumns
from eke.models.checkpoints.architecture import logits_change
from eke.models.families import FAMILIES
from eke.models.sizes import is_ragged
from eke.rules.memory import accumulates
from eke.rules.rule import (
    VOLTA,
    Rule,
    RuleInputs,
    capability_of,
    needs_capability,
    needs_compiler,
    older_than,
    without_benefit,
    without_effect,
)

_COMPILER = "https://docs.pytorch.org/docs/stable/torch.compiler.html"
_ISSUES = "https://github.com/pytorch/pytorch/issues"


def _inductor(facts: RuleInputs) -> bool:
    return facts.config.compile.option == "inductor"


def replays_graphs(facts: RuleInputs) -> bool:
    """Return whether the step runs as recorded CUDA graphs."""
    return facts.on_cuda and facts.config.compile.replays_graphs


def _replayer(facts: RuleInputs) -> str:
    """Return the override that turns on CUDA graphs."""
    compiler = facts.config.compile
    mode = f"compile.mode={compiler.mode.value}"
    return mode if _inductor(facts) else f"compile={compiler.option}"


def _without_graphs(facts: RuleInputs) -> Fix:
    """Return the override that turns off CUDA graphs and keeps the compiler if possible."""
    if not _inductor(facts):
        return Fix("compile=none")
    if facts.config.compile.mode is CompileMode.max_autotune:
        return Fix("compile.mode=max_autotune_no_cudagraphs")
    return Fix("compile.mode=default")


_LIGER_SOURCE = "https://github.com/linkedin/Liger-Kernel#high-level-apis"
_SPARSE_SOURCE = "sparse_prediction of transformers' ModernBertConfig"

FUSED, SPARSE = "fused_linear_cross_entropy", "sparse_prediction"
"""Keys of `kernels`, and the options that set them."""


def _sparse(facts: RuleInputs) -> bool:
    """Return whether sparse prediction has an effect, i.e. the model predicts tokens."""
    return facts.config.kernels.sparse_prediction and facts.config.targets.per_token


def _liger(facts: RuleInputs) -> bool:
    return facts.config.kernels.option == "liger"


def _without(key: str) -> Callable[[RuleInputs], Fix]:
    off = Fix(f"kernels.{key}=false")
    return lambda f: Fix("kernels=none") if f.config.kernels.option == key else off


def _has_all_labels(facts: RuleInputs) -> bool:
    """Return whether all positions but the last of a sequence have a label."""
    data = facts.data
    if facts.config.task.option == "masked_lm":
        return False
    if isinstance(data, Conversations | Mix):  # the sources of a mix are not inspected
        return False
    if isinstance(data, TextColumns) and data.prompt is not None:
        return facts.config.task.option == "seq2seq_lm" and data.packing is not Packing.off
    return not is_ragged(facts.config) or data.packing is not Packing.off


def _known_head(key: str) -> Rule:
    """Return the rule that a fused head needs a known transformation of the logits."""
    return Rule(
        key=f"kernels.{key}",
        when=lambda f: (
            getattr(f.config.kernels, key)
            and f.config.targets.per_token
            and logits_change(f.config) is None
        ),
        why="the model class may change its logits in a way that this kernel would skip",
        fix=_without(key),
        source="transformers 5: Gemma 2 caps its logits and Granite scales them: supported. "
        "RecurrentGemma caps them in another form",
    )


RULES = dict(
    cudagraphs_need_cuda=Rule(
        key="compile",
        when=lambda f: f.config.compile.option == "cudagraphs" and f.on_cpu,
        why=lambda f: f"CUDA graphs need an NVIDIA GPU. {f.device.name} is a CPU",
        source="https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
    ),
    mode_is_inductors=without_effect(
        key="compile.mode",
        when=lambda f: not _inductor(f),
        why=lambda f: f"only inductor has modes. This run uses compile={f.config.compile.option}",
        source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    ),
    graph_modes_need_cuda=without_effect(
        key="compile.mode",
        when=lambda f: _inductor(f) and f.config.compile.replays_graphs and f.on_cpu,
        why=lambda f: f"uses CUDA graphs, which need an NVIDIA GPU. {f.device.name} is a CPU",
        fix=_without_graphs,
        source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    ),
    graphs_take_one_micro_batch=Rule(
        key="compile",
        # Without batch.per_device there is no check: batch=auto checks each candidate.
        when=lambda f: replays_graphs(f) and f.config.batch.per_device and accumulates(f),
        why=lambda f: (
            f"with {_replayer(f)} a micro-batch overwrites the gradients of the previous one "
            "in the memory of the CUDA graphs"
        ),
        fix=lambda f: Fix(
            *_without_graphs(f).words,
            remark="or one micro-batch per step: a larger batch.per_device",
        ),
        source=f"{_ISSUES}/169545",
        versions="torch 2.13",
    ),
    graphs_take_the_whole_model=Rule(
        key="compile.regional",
        when=lambda f: replays_graphs(f) and f.config.compile.regional,
        why=lambda f: (
            f"{_replayer(f)} records one CUDA graph per layer. In evaluation a layer overwrites "
            "its input"
        ),
        source=f"{_ISSUES}/152887",
        versions="torch 2.13",
    ),
    regional_needs_compiler=without_effect(
        key="compile.regional",
        when=lambda f: f.config.compile.option == "none",
        why="compile=none does not compile the model",
        fix=Fix("compile=inductor"),
        source="https://docs.pytorch.org/tutorials/recipes/regional_compilation.html",
    ),
    inductor_needs_volta=Rule(
        key="compile",
        when=lambda f: _inductor(f) and older_than(f, VOLTA),
        why=needs_capability("Triton kernels need", VOLTA),
        source=_COMPILER,
    ),
    inductor_needs_compiler=needs_compiler("compile", _inductor, Fix("compile=none"), _COMPILER),
    fused_loss_needs_vocabulary=without_effect(
        key="kernels.fused_linear_cross_entropy",
        when=lambda f: not f.config.task.per_token,
        why="sequence_classification has no vocabulary projection",
        fix=_without(FUSED),
        source="https://arxiv.org/abs/2410.10989, section 3.2",
    ),
    fused_loss_needs_known_head=_known_head(FUSED),
    sparse_prediction_needs_vocabulary=without_effect(
        key="kernels.sparse_prediction",
        when=lambda f: not f.config.task.per_token,
        why="sequence_classification predicts one label per sequence",
        fix=_without(SPARSE),
        source=_SPARSE_SOURCE,
    ),
    sparse_prediction_needs_missing_labels=without_benefit(
        key="kernels.sparse_prediction",
        when=lambda f: _sparse(f) and _has_all_labels(f),
        why=lambda f: f"task={f.config.task.option} gives every position of this data a label",
        fix=_without(SPARSE),
        source=_SPARSE_SOURCE,
    ),
    sparse_prediction_needs_known_head=_known_head(SPARSE),
    sparse_prediction_needs_whole_batches=Rule(
        key="kernels.sparse_prediction",
        when=lambda f: _sparse(f) and f.distributed.option == "dp",
        why="distributed=dp splits the label positions, which index the entire batch",
        fix=_without(SPARSE),
        source="torch.nn.parallel.DataParallel: tensors are scattered along their first dimension",
    ),
    sparse_prediction_changes_shapes=Rule(
        key="kernels.sparse_prediction",
        when=lambda f: _sparse(f) and replays_graphs(f),
        why="the number of labels changes in each step. A CUDA graph needs fixed shapes",
        fix=_without_graphs,
        source="https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
    ),
    liger_needs_cuda=Rule(
        key="kernels",
        when=lambda f: _liger(f) and f.on_cpu,
        why=lambda f: f"Liger's Triton kernels need a GPU. {capability_of(f)}",
        source=_LIGER_SOURCE,
    ),
    liger_needs_known_family=Rule(
        key="kernels",
        when=lambda f: _liger(f) and f.model_family.is_known and not f.model_family.has_liger,
        why=lambda f: (
            f"Liger does not support {f.model_family.name}. Supported: "
            + ", ".join(name for name, family in FAMILIES.items() if family.has_liger)
        ),
        source=_LIGER_SOURCE,
        versions="liger-kernel 0.8.5",
    ),
    liger_needs_compiler=needs_compiler(
        "kernels",
        lambda f: _liger(f) and f.on_cuda,
        Fix("kernels=none"),
        "triton/runtime/build.py",
    ),
)
