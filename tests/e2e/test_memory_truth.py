"""Predicted peaks against what real trainings on this CPU take, over a seeded sample.

`benchmarks/memory_truth_cpu.py` does the same for more of them, with other seeds.
"""

import statistics

import pytest
from memory_truth import COMMON, MODELS, Case, Outcome, cases, measured_apart, plan_of, step_peak
from support import last_wins

from eke.estimate.memory.components import Method
from eke.estimate.memory.predict_memory import forecast
from eke.estimate.memory.trace_client import get_or_run_trace, trace_all

SEED, COUNT = 11, 10


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")  # what kernels take depends on it: the same for both
        chosen = cases(SEED, COUNT)
        answers = trace_all([plan_of(case) for case in chosen])
        return [
            Outcome(case, answer.traced and step_peak(answer.traced.allocated), peak, answer.reason)
            for case, answer, peak in zip(chosen, answers, map(measured_apart, chosen), strict=True)
        ]


PARTS = (
    "model=tiny_bert task=sequence_classification model.freeze=[embeddings,encoder.layer.0-1]",
    "model=tiny memory=checkpointing model.freeze=[layers.1-2]",
    "model=tiny_t5 task=seq2seq_lm batch.accumulation=2 model.freeze=[encoder]",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", PARTS)
def test_frozen_model_peak_is_predicted_within_1_percent(words) -> None:
    typed = [*words.split(), "precision=bf16", "batch.per_device=4", "data.seq_len=64", *COMMON]
    typed += ["data.num_samples=32", "model.vocab_size=1000"]
    frozen = Case("", tuple(typed))
    whole = Case("", tuple(word for word in typed if "freeze" not in word))
    answer = get_or_run_trace(plan_of(frozen))
    peak = measured_apart(frozen)
    assert answer.traced is not None
    assert step_peak(answer.traced.allocated) == pytest.approx(peak, rel=0.01)
    bounds = forecast(plan_of(frozen)).allocated
    assert bounds.low <= peak <= bounds.high
    assert peak < measured_apart(whole)


LLAMA = "model=tiny model.vocab_size=320 data.seq_len=160 batch.per_device=6 precision=bf16"
LLAMA_32 = LLAMA.replace("bf16", "fp32")
BERT = "model=tiny_bert task=masked_lm model.vocab_size=320 batch.per_device=6 precision=bf16"
T5 = "model=tiny_t5 task=seq2seq_lm model.vocab_size=320 data.seq_len=160 batch.per_device=6"
REGIONAL = "compile=inductor compile.regional=true"
ONE_LAYER = "model.num_hidden_layers=1"
COMPILED = {
    "llama": f"{LLAMA} {ONE_LAYER} compile=inductor",
    "lora": f"{LLAMA} {REGIONAL} peft=lora",
    "masked bert": f"{BERT} {REGIONAL} data.seq_len=150 data.pad_to_multiple_of=16",
    "whole again": f"{LLAMA_32} {ONE_LAYER} compile=inductor memory=checkpointing",
    "t5 again": f"{T5} {ONE_LAYER} precision=bf16 {REGIONAL} memory=checkpointing",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_model_peak_is_predicted(name) -> None:
    """One of them also evaluates: with fewer rows, so that the trained graph has any number."""
    typed = ("model.num_hidden_layers=2", *COMPILED[name].split(), *COMMON, "data.num_samples=48")
    case = Case("", last_wins(*typed))
    answer = get_or_run_trace(plan_of(case))
    assert answer.traced is not None, answer.reason
    assert (answer.traced.method, answer.traced.is_exact) == (Method.trace, True)
    peak = measured_apart(case, evaluates=name == "llama")
    assert step_peak(answer.traced.allocated) == pytest.approx(peak, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["none", "checkpointing_selective"])
def test_fused_adapters_are_predicted(memory) -> None:
    typed = ("model=tiny", "model.dropout=0", "peft=lora", "precision=bf16", f"memory={memory}")
    typed += ("batch.per_device=4", "data.seq_len=64", "data.num_samples=32", *COMMON)
    fused, plain = (Case("", (*typed, f"peft.fused={on}")) for on in ("true", "false"))
    answer = get_or_run_trace(plan_of(fused))
    peak = measured_apart(fused)
    assert answer.traced is not None
    assert step_peak(answer.traced.allocated) == pytest.approx(peak, rel=0.01)
    bounds = forecast(plan_of(fused)).allocated
    assert bounds.low <= peak <= bounds.high
    assert peak < measured_apart(plain)


@pytest.mark.slow
def test_every_case_can_be_traced(outcomes) -> None:
    assert not [f"{o.case.overrides}: {o.reason}" for o in outcomes if o.predicted is None]
    assert {o.case.family for o in outcomes} == set(MODELS)


@pytest.mark.slow
def test_predictions_are_true(outcomes) -> None:
    known = [o for o in outcomes if o.is_known]
    assert len(known) >= 0.8 * COUNT
    errors = sorted(abs(o.error) for o in known)
    worst = max(known, key=lambda o: abs(o.error))
    told = f"{worst.error:+.3%}: {' '.join(worst.case.overrides)}"
    assert statistics.mean(errors) <= 0.003, told
    assert errors[int(0.95 * len(errors)) - 1] <= 0.01, told
