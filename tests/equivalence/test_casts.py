"""precision.casts=per_step: 16-bit copies of float32 weights, made once for all micro-batches."""

from collections import Counter

import pytest
import torch
from equivalence_cases import CASES, ONE_SHAPE, RAGGED
from equivalence_compare import curve, largest_difference
from support import TINY, last_wins
from torch.utils._python_dispatch import TorchDispatchMode
from trained import continue_job, start_job, steps_of, train_job

from eke.training.loop.loop import next_step, train_step
from eke.training.loop.step import take_step

ONCE = "precision.casts=per_step"
COPIED = ("precision=bf16", ONCE)
LLAMA, BERT = CASES["causal_lm-llama"], CASES["masked_lm-bert"]
CUT = ("batch.per_device=3", "batch.accumulation=4")
WHOLE = ("batch.per_device=12",)


@pytest.fixture
def job_of(make_plan, tmp_path):
    """Overrides -> the job before its first step."""
    folders = iter(tmp_path / str(number) for number in range(9))

    def start(*overrides):
        plan = make_plan(*last_wins(*TINY, *RAGGED, *CUT, *overrides))
        return start_job(plan, next(folders))

    return start


def gradients(job) -> dict[str, torch.Tensor]:
    """Of the first step, by name."""
    cut, totals = next_step(job, job.data.train_steps(0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(job.update), "apply", lambda *_: None)
        take_step(job, cut, totals.num_targets, 0, lambda phase: None)
    named = job.bare_model.named_parameters()
    return {n: p.grad.double() for n, p in named if p.grad is not None}


def distance(found, exact) -> float:
    """Relative, of all gradients as one vector."""
    assert found.keys() == exact.keys()
    squares = sum(((found[n] - exact[n]) ** 2).sum() for n in exact)
    return float((squares / sum((g**2).sum() for g in exact.values())) ** 0.5)


def exact_gradients(job_of, *overrides):
    job = job_of(*overrides, "precision=fp32")
    job.bare_model.double()
    return gradients(job)


@pytest.mark.parametrize("case", [LLAMA, BERT], ids=["llama", "bert"])
def test_cast_gradients_are_as_accurate_as_autocast(case, job_of) -> None:
    """Twice: a 16-bit residual stream is rounded in each layer (notes/lab/numerics.md)."""
    exact = exact_gradients(job_of, *case)
    cast, copied = (gradients(job_of(*case, *o)) for o in (("precision=bf16",), COPIED))
    assert 2**-12 < distance(copied, exact) < 2 * distance(cast, exact)


@pytest.mark.parametrize("case", [BERT, CASES["causal_lm-gpt2"]], ids=["bert", "gpt2"])
def test_sums_over_many_tokens_are_float32(case, job_of) -> None:
    """All tokens of 64 rows have one type, and one bias of each norm: in bfloat16 the sum of so
    many stops growing."""
    many = ("data.lengths=fixed", "data.min_len=null", "batch.per_device=16", "data.seq_len=32")
    many = (*many, "data.num_samples=64")
    exact, copied = exact_gradients(job_of, *case, *many), gradients(job_of(*case, *many, *COPIED))
    for name in exact:
        if "embeddings" in name or "norm" in name.lower() or "ln_" in name:
            assert (copied[name] - exact[name]).norm() < 0.02 * exact[name].norm(), name


CUT_BOUNDS = {"bf16": 10 * 2**-9, "fp16": 10 * 2**-11}
"""As tests/equivalence/test_same_mathematics.py: ten times the rounding of one product."""


@pytest.mark.parametrize(
    ("case", "precision"),
    [(BERT, "bf16"), pytest.param(LLAMA, "fp16", marks=pytest.mark.slow)],
    ids=["bert", "llama"],
)
def test_four_micro_batches_equal_one(case, precision, curve_of) -> None:
    base = (*case, *TINY, *RAGGED, f"precision={precision}", ONCE)
    whole, cut = curve_of(*base, *WHOLE), curve_of(*base, *CUT)
    differences = [abs(a[0] - b[0]) / a[0] for a, b in zip(whole, cut, strict=True)]
    assert max(differences) < CUT_BOUNDS[precision]


TECHNIQUES = {
    "fp16": ("precision=fp16",),
    "fp8": ("precision=fp8",),
    "lora": ("peft=lora",),
    "qlora": ("peft=qlora",),
    "dora, selective": ("peft=dora", "memory=checkpointing_selective"),
    "wide base, checkpointing": ("peft=lora", "peft.base_weights=float32", "memory=checkpointing"),
    "checkpointing, fused loss": ("memory=checkpointing", "kernels=fused_linear_cross_entropy"),
    "untied": ("model.tie_word_embeddings=false",),
    "moe, schedule-free": ("model=tiny_moe", "optimizer=schedule_free", "schedule=constant"),
    "muon, float32 evaluation": ("optimizer=muon", "precision.evaluation=float32"),
    "frozen, selective": ("model.freeze=[embed_tokens,layers.0]", "memory=checkpointing_selective"),
    "regional": ("compile=aot_eager", "compile.regional=true", *ONE_SHAPE),
    **{name: case for name, case in CASES.items() if "classification" not in name},
}  # fmt: skip
QUICK = ("causal_lm-llama", "fp16", "lora", "untied")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TECHNIQUES]
)
def test_curves_stay_near_autocasts(name, baseline_of) -> None:
    if name == "fp8":
        pytest.importorskip("torchao", reason="an extra")
    typed = (*CUT, "precision=bf16", *TECHNIQUES[name])
    base = last_wins(*LLAMA, *TINY, *RAGGED, *typed)
    cast, copied = baseline_of(*base), baseline_of(*base, ONCE)
    differences = [abs(a[0] - b[0]) / a[0] for a, b in zip(cast, copied, strict=True)]
    # Of adapters all else has 16 bits anyway, and their own products are autocast's bit for bit.
    least = -1.0 if name in ("lora", "qlora") else 1e-7
    assert least < max(differences) < (2**-4 if name == "fp8" else 10 * 2**-9)


def test_engines_agree_to_the_last_bit(curve_of, baseline_of) -> None:
    base = (*LLAMA, *TINY, *RAGGED, *CUT, *COPIED)
    assert baseline_of(*base) == curve_of(*base, "engine=trainer")


@pytest.mark.parametrize("engine", ["loop", pytest.param("trainer", marks=pytest.mark.slow)])
def test_run_resumes_bit_exact(engine, make_plan, tmp_path) -> None:
    saved = ("train.steps=4", "train.checkpoint_every=2", "train.log_every=1", f"engine={engine}")
    plan = make_plan(*last_wins(*LLAMA, *TINY, *RAGGED, *CUT, *COPIED, *saved))
    whole = train_job(plan, tmp_path / "whole")
    rest = continue_job(whole, 2, tmp_path / "rest")
    assert steps_of(rest) == {n: found for n, found in steps_of(whole).items() if n > 2}
    assert {p.dtype for p in whole.bare_model.parameters()} == {torch.float32}
    model = whole.bare_model
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied, as before"


class CountedCasts(TorchDispatchMode):
    """Counts how often a float32 tensor of a weight's shape becomes 16 bits wide."""

    def __init__(self, model) -> None:
        super().__init__()
        self.shapes = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
        self.counts = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.bfloat16:
            shapes = {tuple(args[0].shape), tuple(args[0].shape)[::-1]}
            self.counts["in forward"] += bool(
                args[0].dtype is torch.float32 and shapes & self.shapes
            )
        if func is torch.ops.aten._foreach_copy_.default:
            self.counts["at once"] += sum(t.dim() > 1 for t in args[0])
        return out


@pytest.mark.parametrize("compiled", [(), ("compile=aot_eager",)], ids=["eager", "aot_eager"])
def test_weights_are_cast_once_per_step(compiled, job_of) -> None:
    counts = {}
    fixed = ("data.lengths=fixed", "data.min_len=null", "model.vocab_size=301")
    fixed = (*fixed, "model.num_hidden_layers=1")
    for name in ("per_use", "per_step"):
        job = job_of(*LLAMA, *fixed, *compiled, "precision=bf16", f"precision.casts={name}")
        batches = job.data.train_steps(0, 0)
        train_step(job, batches, 0)  # compiles
        with CountedCasts(job.bare_model) as counted:
            train_step(job, batches, 1)
        counts[name] = counted.counts
        matrices = sum(p.dim() > 1 for p in job.bare_model.parameters())
    assert counts["per_step"] == {"in forward": 0, "at once": matrices}
    assert counts["per_use"]["in forward"] >= 4 * matrices


@pytest.mark.slow
def test_compiled_code_is_reused_across_steps(make_plan, tmp_path) -> None:
    from eke.training.model.number_formats import compile_report

    fixed = ("data.lengths=fixed", "data.min_len=null", "data.num_samples=24")
    plan = make_plan(*last_wins(*LLAMA, *TINY, *RAGGED, *CUT, *fixed, *COPIED, "compile=aot_eager"))
    job = train_job(plan, tmp_path)
    report = compile_report()
    assert report["graph_breaks"] == 0
    assert report["graphs"] <= 3, "trained, and evaluated on batches of one or two sizes"
    assert largest_difference(curve(job), curve(job)) == 0


def test_model_with_mixed_weight_formats_is_rejected() -> None:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    from eke.common.errors import RunError
    from eke.training.model.model_checks import check_copies
    from eke.training.model.number_formats import NarrowCopies

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    table = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    config = DebertaV2Config(**sizes, **table, vocab_size=50, intermediate_size=16, eos_token_id=1)
    model = DebertaV2ForMaskedLM(config)
    with pytest.raises(RunError, match=r"DebertaV2ForMaskedLM mixes.* -> precision.casts=per_use"):
        check_copies(model, NarrowCopies(model, torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "put back"
