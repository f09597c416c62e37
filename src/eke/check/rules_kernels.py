"""Rules about fused kernels."""

import importlib.util
from pathlib import Path

from eke.check.capability import (
    capability_of,
    lacks_compiler,
    with_compiler,
    without_compiler,
)
from eke.check.rule import Facts, Rule, Verdict

FUSABLE = ("llama", "qwen2", "qwen3", "mixtral", "gpt2", "bert", "t5")
"""Families whose output is the projection itself; others scale or cap the logits after it."""

LIGER = ("llama", "qwen2", "qwen3", "mixtral")
"""Families that liger-kernel 0.8.5 has kernels for, of those with a closed form here."""

LIGER_SOURCE = "https://github.com/linkedin/Liger-Kernel#high-level-apis"
FUSED_SOURCE = (
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html"
)


def has_linear_cross_entropy() -> bool:
    """Whether the installed torch has the operation, by its files: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return True  # nothing to say about a torch that is not there
    options = Path(spec.origin).parent / "nn" / "modules" / "linear_cross_entropy_options.py"
    return options.exists()


def _fused(facts: Facts) -> bool:
    return facts.config.kernels.fused_linear_cross_entropy


def _predicts_tokens(facts: Facts) -> bool:
    return facts.config.task.option != "sequence_classification"


def _without_fusion(facts: Facts) -> str:
    if facts.config.kernels.option == "fused_linear_cross_entropy":
        return "kernels=none"
    return "kernels.fused_linear_cross_entropy=false"


RULES = (
    Rule(
        id="fused_loss_needs_torch",
        verdict=Verdict.impossible,
        path="kernels.fused_linear_cross_entropy",
        when=lambda f: (
            _fused(f) and _predicts_tokens(f) and not f.planning and not has_linear_cross_entropy()
        ),
        value=lambda f: _fused(f),
        why=lambda f: "the installed torch has no linear_cross_entropy in pieces; torch 2.13 has",
        fix=_without_fusion,
        source=FUSED_SOURCE,
        versions="torch < 2.13",
    ),
    Rule(
        id="fused_loss_needs_vocabulary",
        verdict=Verdict.no_effect,
        path="kernels.fused_linear_cross_entropy",
        when=lambda f: _fused(f) and not _predicts_tokens(f),
        value=lambda f: _fused(f),
        why=lambda f: "sequence_classification has no vocabulary projection to fuse with its loss",
        fix=_without_fusion,
        source=FUSED_SOURCE,
    ),
    Rule(
        id="fused_loss_needs_known_head",
        verdict=Verdict.impossible,
        path="kernels.fused_linear_cross_entropy",
        when=lambda f: _fused(f) and _predicts_tokens(f) and f.config.model.family not in FUSABLE,
        value=lambda f: _fused(f),
        why=lambda f: (
            "this architecture may scale or cap its logits after the projection, which the fused "
            f"operation would leave out; it is known for {', '.join(FUSABLE)}"
        ),
        fix=_without_fusion,
        source="transformers 5: Gemma 2 caps its logits, Granite and Cohere scale them",
    ),
    Rule(
        id="liger_needs_cuda",
        verdict=Verdict.impossible,
        path="kernels",
        when=lambda f: f.config.kernels.option == "liger" and f.device.kind == "cpu",
        value=lambda f: f.config.kernels.option,
        why=lambda f: f"Liger's kernels are written in Triton for GPUs; {capability_of(f)}",
        fix=lambda f: "kernels=none",
        source=LIGER_SOURCE,
    ),
    Rule(
        id="liger_needs_known_family",
        verdict=Verdict.impossible,
        path="kernels",
        when=lambda f: (
            f.config.kernels.option == "liger" and f.config.model.family not in (*LIGER, "other")
        ),
        value=lambda f: f.config.kernels.option,
        why=lambda f: (
            f"Liger has no kernels for {f.config.model.family}; it has them for {', '.join(LIGER)}"
        ),
        fix=lambda f: "kernels=none",
        source=LIGER_SOURCE,
        versions="liger-kernel 0.8.5",
    ),
    Rule(
        id="liger_needs_compiler",
        verdict=Verdict.impossible,
        path="kernels",
        when=lambda f: (
            f.config.kernels.option == "liger" and f.device.kind == "cuda" and lacks_compiler(f)
        ),
        value=lambda f: f.config.kernels.option,
        why=without_compiler,
        fix=lambda f: f"kernels=none{with_compiler(f)}",
        source="triton/runtime/build.py, _find_compiler",
    ),
)
