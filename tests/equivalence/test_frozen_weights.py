"""Adapters over 16-bit frozen weights compute what plain transformers and PEFT compute."""

from functools import cache

import pytest
import torch
import transformers
from checkpoints import FAMILIES, TASK_OF, checkpoint_plan, save_checkpoint
from peft import PeftModel
from support import TINY, last_wins
from trained import continue_job, steps_of, train_job
from unit.training.model.steps import make_inputs

from eke.models.sizes import state_bytes
from eke.training.model.adapters import apply_peft, merge_adapters, quant_tensors, save_adapter
from eke.training.model.build_model import build_model_and_report
from eke.training.model.dropout import set_dropout
from eke.training.model.model_checks import HEADS

# peft 0.21 asks by a name that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)

CPU = torch.device("cpu")
STILL = "model.dropout=0.0"
METHODS = ("lora", "dora", "ia3")
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family and format -> a checkpoint that no test changes."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(family: str, precision: str):
        folder = root / f"{family}-{precision}"
        if precision == "fp32":
            return save_checkpoint(folder, family)
        plain = getattr(transformers, HEADS[TASK_OF.get(family, "causal_lm")])
        model = plain.from_pretrained(make(family, "fp32"), dtype=FORMATS[precision])
        model.save_pretrained(folder)
        return folder

    return make


def build(plan):
    base, report = build_model_and_report(plan, CPU)
    model = apply_peft(plan, base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.02 * torch.randn(p.shape, generator=generator)
    return model, report


def step(model, dtype):
    inputs = make_inputs(model.get_base_model())
    with torch.autocast("cpu", dtype):
        logits = model(**inputs).logits
    loss = logits.float().square().mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return logits.detach(), loss.item(), gradients


@pytest.mark.parametrize(
    ("family", "method", "precision"),
    [
        ("llama", "lora", "bf16"),
        ("llama", "dora", "fp16"),
        ("bert", "ia3", "bf16"),
        ("bert", "dora", "bf16"),
        ("gpt2", "lora", "fp16"),  # whose weights lie the other way round
        ("gpt2", "ia3", "fp16"),
        ("gpt2", "dora", "bf16"),
        ("t5", "dora", "fp16"),  # whose class keeps some layers in float32
        ("t5", "lora", "bf16"),
        ("mistral", "lora", "bf16"),
        ("qwen2", "ia3", "bf16"),
        ("qwen3", "dora", "bf16"),
    ],
)
def test_loss_and_gradients_match_peft(saved, family, method, precision, tmp_path):
    task, dtype = TASK_OF.get(family, "causal_lm"), FORMATS[precision]
    path = saved(family, precision)
    plan = checkpoint_plan(path, STILL, f"task={task}", f"peft={method}", f"precision={precision}")
    model, report = build(plan)
    assert not report.notes
    save_adapter(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(path)
    set_dropout(config, 0.0)
    base = getattr(transformers, HEADS[task]).from_pretrained(path, config=config, dtype=dtype)
    plain = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).train()
    logits, loss, gradients = step(model, dtype)
    other_logits, other_loss, other = step(plain, dtype)
    assert torch.equal(logits, other_logits)
    assert loss == other_loss
    assert set(gradients) == set(other)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other[name]), name


@pytest.mark.parametrize(
    ("family", "method", "precision"),
    [
        *((family, "qlora", "bf16") for family in FAMILIES),
        *((family, "lora", "bf16") for family in ("llama", "bert", "gpt2", "mixtral")),
        ("llama", "dora", "bf16"),
        ("bert", "ia3", "fp16"),
        ("t5", "lora", "fp16"),  # whose class keeps some layers in float32
    ],
)
def test_formats_and_bytes_match_the_plan(saved, family, method, precision):
    task = "sequence_classification" if family in ("bert", "llama") else TASK_OF.get(family)
    more = (f"task={task or 'causal_lm'}", f"peft={method}", f"precision={precision}")
    plan = checkpoint_plan(saved(family, precision), STILL, *more)
    model, _ = build(plan)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    held = [*model.parameters(), *quant_tensors(model)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(storages.values()) == state_bytes(plan.config, plan.compute).weights


def test_head_keeps_float32_values_of_the_checkpoint(saved, tmp_path):
    more = ("task=sequence_classification", "precision=bf16")
    whole, _ = build_model_and_report(checkpoint_plan(saved("bert", "fp32"), STILL, *more), CPU)
    plan = checkpoint_plan(saved("bert", "fp32"), STILL, *more, "peft=lora")
    model, report = build_model_and_report(plan, CPU)
    (rounded,) = report.notes
    assert rounded in report.warnings
    assert "from float32 to bfloat16" in rounded
    assert "base_weights=float32" in rounded
    assert torch.equal(model.classifier.weight, whole.classifier.weight)
    frozen = model.bert.embeddings.word_embeddings.weight
    assert frozen.dtype is torch.bfloat16
    assert torch.equal(frozen, whole.bert.embeddings.word_embeddings.weight.bfloat16())


@pytest.mark.parametrize("typed", ["precision=bf16_pure", "precision=bf16_pure peft=lora"])
def test_model_without_frozen_weights_has_no_warning(saved, typed):
    plan = checkpoint_plan(saved("llama", "fp32"), STILL, *typed.split())
    assert not build_model_and_report(plan, CPU)[1].notes


@pytest.mark.parametrize("method", METHODS)
def test_merged_weights_match_peft(saved, method, tmp_path):
    path = saved("llama", "bf16")
    plan = checkpoint_plan(path, STILL, f"peft={method}", "precision=bf16")
    model, _ = build(plan)
    save_adapter(model, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    plain = PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    merged = merge_adapters(plan, model).state_dict()
    assert set(merged) == set(plain)
    for name, tensor in merged.items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize(
    ("overrides", "frozen"),
    [
        ("precision=fp32", "float32"),
        ("precision=bf16", "bfloat16"),
        ("precision=fp16", "float16"),
        ("precision=bf16 peft.base_weights=float32", "float32"),
        ("precision=bf16 precision.evaluation=float32", "float32"),
        ("precision=bf16_pure", "bfloat16"),
    ],
)
def test_frozen_weights_have_the_configured_format(saved, overrides, frozen):
    plan = checkpoint_plan(saved("llama", "bf16"), STILL, "peft=lora", *overrides.split())
    assert plan.compute.frozen == frozen


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_run_resumes_bit_exact(task, make_plan, tmp_path):
    more = (f"task={task}", "peft=lora", "peft.dropout=0.1", "precision=bf16", "train.steps=4")
    plan = make_plan(*last_wins(*TINY, *more, "train.checkpoint_every=2", "train.eval_every=null"))
    whole = train_job(plan, tmp_path / "whole")
    rest = continue_job(whole, 2, tmp_path / "rest")
    assert steps_of(rest) == {n: found for n, found in steps_of(whole).items() if n > 2}
