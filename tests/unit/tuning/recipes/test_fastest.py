"""recipe=fastest: what it takes on which device, for which model, and the reason it gives."""

import json
from dataclasses import replace

import pytest
from recipe_plans import BERT, LLAMA, LONG, chosen, planned, said

from eke.estimate.memory import Verdict, forecast
from eke.estimate.time import compile_seconds
from eke.tuning.recipes.techniques import COMPILE_GAIN, HOST_LAUNCH_S, LAUNCHES_PER_LAYER, REGIONAL

FASTEST = "recipe=fastest"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "precision", "words"),
    [
        ("v100_16", "fp16", "8.0 times as fast as float32 (125 and 15.7 TFLOP/s"),
        ("t4", "fp16", "without units for bfloat16"),
        ("rtx3090", "bf16", "2.0 times as fast as float32 (71 and 35.6 TFLOP/s"),
        ("h100", "bf16", "14.8 times as fast"),
    ],
)
def test_format_follows_the_device(hardware, precision, words) -> None:
    plan = planned(FASTEST, *BERT, f"hardware={hardware}")
    assert plan.choices["precision"] == precision
    assert plan.config.precision.option == precision
    decision = said(plan, "precision")
    assert decision.value == precision
    assert words in decision.reason
    assert plan.compute.weights == "float32", "float32 weights, whatever is multiplied"


@pytest.mark.parametrize(
    ("flags", "width", "precision", "words"),
    [
        (("avx512_bf16",), 256, "bf16", "avx512_bf16"),
        (("avx512_bf16",), 64, "fp32", "too narrow"),
        ((), 256, "fp32", "no units for bfloat16"),
    ],
)
def test_cpu_format_follows_matrix_units_and_width(flags, width, precision, words, units):
    units(*flags)
    plan = planned(FASTEST, "hardware=cpu", f"model.hidden_size={width}")
    assert plan.choices["precision"] == precision
    assert words in said(plan, "precision").reason


@pytest.mark.slow
def test_gpu_without_datasheet_is_identified_by_generation(monkeypatch) -> None:
    from eke.hardware import Device

    for capability, precision in (((8, 6), "bf16"), ((7, 5), "fp16"), ((6, 1), "fp32")):
        unknown = Device("cuda", "another GPU", memory_bytes=2**34, capability=capability)
        monkeypatch.setattr(
            "eke.workflows.planning.choose_device", lambda _, found=unknown: (found, "found")
        )
        plan = planned(FASTEST, *BERT)
        assert plan.choices["precision"] == precision
        assert "another GPU" in said(plan, "precision").reason


@pytest.mark.slow
def test_float8_is_suggested_for_wide_matrices_and_never_chosen() -> None:
    wide, narrow = (
        planned(FASTEST, *LLAMA, "hardware=h100"),
        planned(FASTEST, *BERT, "hardware=h100"),
    )
    older = planned(FASTEST, *LLAMA, "hardware=a100_80")
    assert "precision=fp8" in said(wide, "precision").reason
    assert "precision=fp8" not in said(narrow, "precision").reason
    assert "precision=fp8" not in said(older, "precision").reason
    assert wide.compute.float8 == "off"


@pytest.mark.slow
def test_samples_per_step_are_kept_with_the_largest_micro_batch() -> None:
    plain = planned(*BERT, "batch.per_device=1", "batch.target=32", "hardware=h200")
    plan = planned(FASTEST, *BERT, "batch.target=32", "hardware=h200")
    assert plan.batch.samples_per_step == plain.batch.samples_per_step == 32
    assert plan.batch.per_device == 32
    assert said(plan, "batch").value == "auto"
    small = planned(FASTEST, *BERT, "batch.target=512", "hardware=v100_16")
    assert 1 < small.batch.per_device < 512
    assert small.batch.samples_per_step == 512


@pytest.mark.slow
def test_flash3_is_chosen_with_its_package_or_a_reason(packages) -> None:
    asked = (FASTEST, *LLAMA, "hardware=h200")
    packages("flash_attn_interface")
    assert planned(*asked).choices["attention"] == "flash3"
    assert "attention" in chosen(planned(FASTEST, *LLAMA, "hardware=a100_80"))
    assert planned(FASTEST, *LLAMA, "hardware=a100_80").choices["attention"] == "sdpa"
    packages()
    plan = planned(*asked)
    assert plan.choices["attention"] == "sdpa"
    assert "flash_attn_interface is not installed" in said(plan, "attention").reason


def test_padding_free_is_chosen_if_the_kernel_supports_it(packages) -> None:
    ragged = (FASTEST, *LLAMA, "data.lengths=uniform", "hardware=a100_80")
    packages("flash_attn")
    plan = planned(*ragged)
    assert (plan.choices["attention"], plan.config.data.packing.value) == ("flash2", "padding_free")
    assert said(plan, "data.packing").value == "padding_free"
    packages()
    plan = planned(*ragged)
    assert (plan.choices["attention"], plan.config.data.packing.value) == ("sdpa", "off")
    assert "data.packing" not in chosen(plan)


def test_fused_loss_is_chosen_for_large_vocabularies() -> None:
    heavy = planned(FASTEST, *LLAMA, "batch.target=16", "hardware=a100_80")
    light = planned(FASTEST, *LLAMA, "model.vocab_size=512", "batch.target=16", "hardware=a100_80")
    no_tokens = planned(FASTEST, *BERT, "hardware=a100_80")
    kernels = [plan.config.kernels.fused_linear_cross_entropy for plan in (heavy, light, no_tokens)]
    assert kernels == [True, False, False]
    reason = said(heavy, "kernels").reason
    assert "float32 logits and their gradient would be" in reason
    assert "expected instead of" in reason


def test_reason_for_an_unfused_loss_is_given() -> None:
    """A short batch's logits weigh much of little: nothing is gained, and that is said."""
    short = ("model=llama_1b", "data=synthetic", "data.seq_len=128", "hardware=h100")
    plan = planned(FASTEST, *short)
    assert plan.choices["kernels"] == "none"
    assert "no forecast shows" in said(plan, "kernels").reason


MASKED = ("model=bert_large", "task=masked_lm", "data=synthetic", "data.seq_len=512")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fastest", "low_memory", "large_model_one_gpu"])
def test_sparse_prediction_is_chosen(recipe) -> None:
    """On every device: it is the same training, and less of it."""
    asked = (f"recipe={recipe}", "batch.per_device=8")
    for hardware in ("h100", "cpu") if recipe == "fastest" else ("h100",):
        plan = planned(*asked, *MASKED, f"hardware={hardware}", "ignore_forecast=true")
        assert plan.config.kernels.sparse_prediction
        assert "85% of the positions have no label" in said(plan, "kernels").reason
    if recipe == "fastest":
        typed = planned(*asked, *MASKED, "hardware=h100", "kernels=none")
        assert not typed.config.kernels.sparse_prediction
        assert not planned(*asked, *LLAMA, "hardware=h200").config.kernels.sparse_prediction


@pytest.mark.slow
def test_sparse_prediction_is_chosen_for_prompts(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    each = [{"q": "how many?", "a": f"three, or {number}"} for number in range(64)]
    rows.write_text("\n".join(map(json.dumps, each)))
    data = ("data=jsonl", f"data.path={rows}", "data.response=a", "data.seq_len=64")
    plan = planned(FASTEST, "model=tiny", *data, "data.prompt=q", "hardware=cpu")
    assert plan.config.kernels.sparse_prediction
    assert "prompt" in said(plan, "kernels").reason


@pytest.mark.slow
def test_cuda_graphs_precede_sparse_prediction() -> None:
    """They are recorded for one number of labels, and save more where the host is the limit."""
    asked = (FASTEST, *MASKED, "hardware=h200", "batch.per_device=2", LONG)
    plan = planned(*asked)
    assert plan.config.compile.mode.value == "reduce_overhead"
    assert not plan.config.kernels.sparse_prediction


def test_compilation_requires_enough_steps() -> None:
    assert pytest.approx(1.157, abs=1e-3) == COMPILE_GAIN
    step = 16 * planned(*LLAMA, "hardware=a100_80").size.flops_per_sample / 312e12
    spent = compile_seconds(planned(*LLAMA, *REGIONAL, "hardware=a100_80"))
    least = spent * 6667 / (6667 - 5762) / step
    asked = (FASTEST, *LLAMA, "batch.target=16", "hardware=a100_80")
    short = planned(*asked, f"train.steps={int(0.99 * least)}")
    long = planned(*asked, f"train.steps={int(1.01 * least) + 1}")
    assert short.choices["compile"] == "none"
    assert f"compiling pays from 1 m 36 s on ({spent:g} s saved" in said(short, "compile").reason
    assert long.choices["compile"] == "inductor"
    assert long.config.compile.regional
    assert "torchtitan" in said(long, "compile").reason


def test_full_compilation_requires_enough_steps() -> None:
    """CUDA graphs need it, and it takes three times as long with 24 layers as by regions."""
    asked = (FASTEST, *BERT, "batch.target=4", "hardware=h200")
    whole = ("compile=inductor", "compile.mode=reduce_overhead")
    plan = planned(*BERT, "precision=bf16", "batch.per_device=4", *whole, "hardware=h200")
    spent = compile_seconds(plan)
    device = 4 * plan.size.flops_per_sample / 989e12
    steps = spent / (HOST_LAUNCH_S * LAUNCHES_PER_LAYER * 24 - device)
    regional = compile_seconds(planned(*BERT, *REGIONAL, "hardware=h200"))
    pays = regional / (1 - 1 / COMPILE_GAIN) / (HOST_LAUNCH_S * LAUNCHES_PER_LAYER * 24)
    assert pays > steps, "compiling at all pays later"
    short = planned(*asked, f"train.steps={int(0.99 * pays)}")
    long = planned(*asked, f"train.steps={int(1.01 * pays) + 1}")
    assert short.choices["compile"] == "none"
    assert long.config.compile.mode.value == "reduce_overhead"
    typed = planned(*asked, "compile.mode=reduce_overhead", f"train.steps={int(0.99 * pays)}")
    assert typed.choices["compile"] == "none"
    assert f"({spent:.2g} s saved" in said(typed, "compile").reason


def test_compilation_is_free_in_steady_state() -> None:
    """The choice of a run of days, and the same run as if it were typed."""
    few = ("train.steps=30", "hardware=h100")
    days, steady = (
        planned(FASTEST, *LLAMA, "hardware=h100", LONG),
        planned(FASTEST, *LLAMA, *few, "recipe.horizon=steady"),
    )
    assert planned(FASTEST, *LLAMA, *few).choices["compile"] == "none"
    assert chosen(steady) == chosen(days)
    assert steady.config.compile.regional
    assert "recipe.horizon=steady ignores" in said(steady, "compile").reason
    pairs = [f"{key}={value}" for key, value in chosen(steady).items()]
    assert planned(*LLAMA, *few, *pairs).run_id == steady.run_id
    graphs = planned(FASTEST, *BERT, "batch.target=4", *few, "recipe.horizon=steady")
    assert graphs.config.compile.mode.value == "reduce_overhead"


def test_cuda_graphs_are_chosen_for_host_bound_steps() -> None:
    small = planned(FASTEST, *BERT, "batch.target=4", LONG, "hardware=h200")
    large = planned(FASTEST, *BERT, "batch.target=64", LONG, "hardware=h200")
    assert small.config.compile.mode.value == "reduce_overhead"
    assert not small.config.compile.regional
    launches = HOST_LAUNCH_S * LAUNCHES_PER_LAYER * 24
    assert f"{launches * 1e3:.1f} ms to launch (estimate" in said(small, "compile").reason
    assert large.config.compile.mode.value == "default"
    assert large.config.compile.regional


@pytest.mark.parametrize(
    ("typed", "option", "words"),
    [
        pytest.param(
            ("batch.per_device=2", "batch.accumulation=2"), "inductor",
            "overwrites the gradients", id="typed",
        ),
        pytest.param(("batch.target=4",), "inductor", "", id="all at once may not fit"),
        pytest.param(
            ("compile.mode=max_autotune",), "none", "at once, which may not fit", id="a mode",
        ),
    ],
)  # fmt: skip
def test_cuda_graphs_are_not_chosen_with_accumulation(typed, option, words, monkeypatch) -> None:
    monkeypatch.setattr(
        "eke.tuning.recipe_search.forecast",
        lambda plan: replace(forecast(plan), verdict=Verdict.tight),
    )
    plan = planned(FASTEST, *BERT, *typed, LONG, "hardware=h200")
    assert plan.choices["compile"] == option
    assert plan.config.compile.regional == (option == "inductor")
    assert plan.config.compile.mode.value == ("default" if option == "inductor" else "max_autotune")
    assert words in said(plan, "compile").reason


@pytest.mark.slow
def test_ragged_rows_are_not_compiled() -> None:
    plan = planned(FASTEST, *LLAMA, "data.lengths=uniform", LONG, "hardware=a100_80")
    assert plan.choices["compile"] == "none"
    assert "each new sequence length" in said(plan, "compile").reason


def test_loader_processes_need_cores(monkeypatch) -> None:
    for cores, option in ((16, "workers"), (2, "none")):
        monkeypatch.setattr("eke.workflows.auto_batch.usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr("eke.rules.training.usable_cores", lambda cores=cores: cores)
        assert planned(FASTEST, *BERT, "hardware=h100").choices["dataloader"] == option


def test_fastest_recipe_takes_no_slow_option() -> None:
    plan = planned(FASTEST, *LLAMA, "hardware=t4")
    assert plan.choices["memory"] == plan.choices["offload"] == "none"
    assert plan.choices["optimizer"] == "adamw"
    assert plan.compute.optimizer_implementation == "fused"
