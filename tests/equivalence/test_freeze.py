"""`model.freeze` outside PEFT: what plain transformers computes with the same weights frozen."""

import re
from functools import cache

import pytest
import torch
import transformers
from checkpoints import TASK_OF, checkpoint_plan, save_checkpoint, save_unknown
from equivalence_cases import CASES, ONE_SHAPE, RAGGED
from equivalence_compare import largest_difference
from support import TINY, last_wins
from trained import continue_job, steps_of, train_job
from unit.training.model.steps import make_inputs

from eke.common.errors import ConfigError
from eke.models.freezing import is_frozen
from eke.models.sizes import state_bytes
from eke.plan.record import metrics
from eke.training.model.build_model import build_model_and_report
from eke.training.model.dropout import set_dropout
from eke.training.model.model_checks import HEADS
from eke.training.model.save_model import save_pretrained

CPU = torch.device("cpu")
STILL = "model.dropout=0.0"
CLASSIFY = "task=sequence_classification"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> a checkpoint in bfloat16 that no test changes."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(family: str):
        if family == "other":
            return save_unknown(root / family)
        if family == "wide":
            return save_checkpoint(root / family, "bert")
        path = save_checkpoint(root / f"{family}-wide", family)
        plain = getattr(transformers, HEADS[TASK_OF.get(family, "causal_lm")])
        plain.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(root / family)
        return root / family

    return make


def build(path, *overrides):
    plan = checkpoint_plan(path, STILL, *overrides)
    return plan, *build_model_and_report(plan, CPU)


def step(model):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**make_inputs(model)).logits
    loss = logits.float().square().mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return logits.detach(), loss.item(), gradients


@pytest.mark.parametrize(
    ("family", "task", "freeze"),
    [
        ("bert", CLASSIFY, "embeddings,encoder.layer.0-0"),
        ("gpt2", "task=causal_lm", "wpe,wte,h.0"),
        ("llama", "task=causal_lm", "embed_tokens,layers.0"),
        ("llama", CLASSIFY, "layers.1,norm"),
        ("t5", "task=seq2seq_lm", "encoder"),
        ("mixtral", "task=causal_lm", "embed_tokens,mlp.gate,experts.down_proj"),
    ],
)
def test_loss_and_gradients_match_transformers(saved, family, task, freeze):
    more = (task, f"model.freeze=[{freeze}]", "precision=bf16")
    plan, model, report = build(saved(family), *more)
    assert not report.notes
    config = transformers.AutoConfig.from_pretrained(saved(family))
    set_dropout(config, 0.0)
    config.num_labels = model.config.num_labels
    head = getattr(transformers, HEADS[plan.config.task.option])
    plain = head.from_pretrained(saved(family), config=config, dtype=torch.float32).train()
    plain.config.pad_token_id = model.config.pad_token_id
    for name, p in plain.named_parameters(remove_duplicate=False):
        if any(name == new for new in report.new_weights):  # drawn: the head
            p.data = model.get_parameter(name).detach().clone()
        if is_frozen(freeze.split(","), [name]):
            p.requires_grad_(False).data = p.data.to(torch.bfloat16)
    logits, loss, gradients = step(model)
    other_logits, other_loss, other = step(plain)
    assert torch.equal(logits, other_logits)
    assert loss == other_loss
    assert 0 < len(gradients) < len(list(model.parameters()))
    assert set(gradients) == set(other)
    for name, gradient in gradients.items():
        same = gradient is other[name] is None or torch.equal(gradient, other[name])
        assert same, name


@pytest.mark.parametrize(
    ("family", "freeze", "precision"),
    [
        ("llama", "lm_head,layers.0", "bf16"),
        ("llama", "lm_head,layers.0", "bf16_pure"),
        ("bert", "decoder,layer.1", "fp32"),
        ("bert", "decoder,layer.1", "bf16"),
        ("gpt2", "wte", "fp16"),
        ("t5", "decoder", "fp16"),
        ("t5", "decoder", "bf16_pure"),
        ("mixtral", "layers.0.mlp", "bf16"),
        ("mixtral", "layers.0.mlp", "fp32"),
        ("qwen2", "self_attn", "bf16_pure"),
        ("qwen3", "model.layers.0-1", "fp16"),
        ("other", "embed_tokens,layers.0", "bf16"),
    ],
)
def test_frozen_formats_and_bytes_match_the_plan(saved, family, freeze, precision):
    more = (f"model.freeze=[{freeze}]", f"precision={precision}")
    plan, model, _ = build(saved(family), f"task={TASK_OF.get(family, 'causal_lm')}", *more)
    computed = "float32" if precision == "fp32" else plan.compute.matmul
    assert plan.compute.frozen == computed
    (reason,) = (d.reason for d in plan.decisions if d.key == "frozen weights")
    assert ("frozen with the embedding" in reason) is (family in ("bert", "gpt2", "t5"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {str(p.dtype) for p in trained} == {f"torch.{plan.compute.weights}"}
    state = state_bytes(plan.config, plan.compute)
    assert sum(p.nbytes for p in model.parameters()) == state.weights
    assert sum(p.nbytes for p in trained) == state.gradients
    assert sum(p.numel() for p in trained) == plan.size.num_trained_parameters


def test_rounded_checkpoint_warns_and_trained_weights_keep_float32(saved):
    _, other, report = build(
        saved("wide"), CLASSIFY, "model.freeze=[embeddings,pooler]", "precision=bf16"
    )
    whole = build(saved("wide"), CLASSIFY)[1]
    assert any("to bfloat16" in w and "precision=fp32" in w for w in report.warnings)
    for name, p in other.named_parameters():
        kept = whole.get_parameter(name)
        assert torch.equal(p, kept.to(p.dtype)), name
        assert (p.dtype is torch.bfloat16) is ("embeddings" in name or "pooler" in name)


def test_frozen_norm_after_trained_weights_receives_float32(saved):
    _, model, _ = build(saved("bert"), CLASSIFY, "model.freeze=[layer.0-1]", "precision=bf16")
    logits, _, gradients = step(model)
    assert logits.isfinite().all()
    assert gradients["bert.embeddings.word_embeddings.weight"].abs().sum() > 0


def test_freeze_pattern_must_match_and_leave_trained_weights(saved):
    cases = {
        "encoder.layers.0-1": r"matches no weight.*-> model.freeze=\[encoder.layer.0-1\]",
        "bert,cls": r"freezes every trained weight.*-> model.freeze=\[\]",
    }
    for freeze, words in cases.items():
        with pytest.raises(ConfigError) as caught:
            checkpoint_plan(saved("bert"), STILL, "task=masked_lm", f"model.freeze=[{freeze}]")
        text = caught.value.short().replace("'", "")
        assert re.search(words, text), text
    with pytest.raises(ConfigError, match="freeze leaves none"):
        checkpoint_plan(saved("bert"), STILL, CLASSIFY, "model.freeze=[encoder]", "optimizer=muon")
    with pytest.raises(ConfigError, match="matches no weight of the checkpoint"):
        checkpoint_plan(saved("other"), STILL, "model.freeze=[embeddings]")


@pytest.mark.slow
def test_run_resumes_bit_exact_and_saves_every_weight(make_plan, tmp_path):
    more = ("model=tiny_moe", "model.freeze=[embed_tokens,layers.0]", "precision=bf16")
    length = ("train.steps=4", "train.checkpoint_every=2", "train.eval_every=null")
    whole = train_job(make_plan(*last_wins(*TINY, *more, *length)), tmp_path / "whole")
    rest = continue_job(whole, 2, tmp_path / "rest")
    assert steps_of(rest) == {n: found for n, found in steps_of(whole).items() if n > 2}
    model, frozen = whole.bare_model, whole.plan.size.num_parameters
    frozen -= whole.plan.size.num_trained_parameters
    assert whole.effective["frozen_parameters"] == frozen
    assert whole.effective["frozen_dtypes"] == ["bfloat16"]
    assert whole.warnings == []
    before = build_model_and_report(whole.plan, CPU)[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before.get_parameter(name)) is not p.requires_grad, name
    save_pretrained(model, tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    inputs = make_inputs(model)
    assert torch.equal(plain(**inputs).logits, model.float().eval()(**inputs).logits)


FROZEN = (
    *CASES["causal_lm-llama"], *TINY, *RAGGED, "model.freeze=[embed_tokens,layers.0]",
    "precision=bf16", "train.max_grad_norm=null",
)  # fmt: skip

TECHNIQUES = {
    "trainer": ("engine=trainer",),
    "checkpointing": ("memory=checkpointing",),
    "selective": ("memory=checkpointing_selective",),
    "in backward": ("memory=optimizer_in_backward",),
    "compiled": ("compile=aot_eager", *ONE_SHAPE[1:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES.keys())
def test_techniques_agree_with_frozen_weights(technique, curve_of, baseline_of) -> None:
    rows = [o for o in technique if o in ONE_SHAPE]
    base = (*FROZEN, "batch.per_device=6", *rows)
    plain, other = baseline_of(*base), curve_of(*base, *technique)
    assert largest_difference(plain, other) < 2**-8
    assert plain[0][0] != plain[-1][0], "the loss never moved"


@pytest.mark.slow
@pytest.mark.parametrize("distributed", ["ddp", "fsdp", "zero2", "zero3"])
def test_ranks_agree_with_frozen_weights(distributed, baseline_of, train_ranks) -> None:
    one = baseline_of(*FROZEN, "batch.per_device=12")
    folder = train_ranks(*FROZEN, f"distributed={distributed}", "batch.per_device=6")
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    rows = metrics.latest(rows, metrics.LOSS)
    two = [(row[metrics.LOSS], row[metrics.GRAD_NORM]) for row in rows]
    assert largest_difference(one, two) < 2**-8
