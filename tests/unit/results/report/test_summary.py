"""The closing summary: what was measured, and no line for what was not."""

import pytest
from unit.plan.record.samples import bare_record, failed, full_record

from eke.plan.record import (
    CalibratedStep,
    Loss,
    MeasuredMemory,
    MemoryRecord,
    PredictedMemory,
    PredictedStep,
    Spread,
    Throughput,
    Timing,
)
from eke.results.report.summary import render_summary

FOLDER = "runs/0123456789abcdef"


def lines(record) -> dict[str, str]:
    """First word or words of each line -> the rest."""
    text = render_summary(record, FOLDER)
    pairs = [line.strip().split("  ", 1) for line in text.splitlines()]
    return {pair[0]: pair[-1].strip() for pair in pairs}


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_summary_omits_unmeasured_values():
    assert render_summary(bare_record(), FOLDER) == f"  steps   0 of 300\n  record  {FOLDER}"


CONTINUED = ("preempted", "cancelled", "timeout")


@pytest.mark.parametrize("outcome", [*CONTINUED, "crashed", "oom", "diverged", "ok"])
def test_summary_of_a_resumable_run_names_the_command(outcome):
    shown = lines(failed(outcome))
    assert ("next" in shown) == (outcome in CONTINUED)


def test_summary_of_a_failure_has_the_reason_without_traceback():
    message = "out of memory in backward: CUDA out of memory. Tried to allocate 2.00 GiB."
    record = failed("oom", "backward", message)
    assert lines(record)["why"] == message
    assert "Traceback" not in render_summary(record, FOLDER)


def test_interrupted_run_shows_its_progress():
    record = full_record(
        outcome="crashed", exit_code=1, steps_done=120, loss=Loss(5.75, 3.5, 5.8), attempt=2
    )
    shown = lines(record)
    assert shown["steps"] == "120 of 300"
    assert shown["attempts"].startswith("3 ")
    assert shown["eval loss"] == "5.8000", "a start and no end"


WITHOUT = {
    "mfu": ({"throughput": Throughput(80.0, 20480.0, 1.5e12)}, "peak,"),
    "speed": ({"throughput": Throughput(), "timing": Timing(train_s=3.0)}, "samples/second"),
    "flops": ({"throughput": Throughput(80.0, 20480.0)}, "model FLOP/s"),
    "steady steps": ({"timing": Timing(train_s=3.0, warmup_steps_s=[1.0])}, "step  "),
    "time": ({"timing": Timing()}, "time  "),
    "memory": ({"memory": MemoryRecord()}, "memory"),
    "peak": ({"memory": MemoryRecord(measured=MeasuredMemory(stages={"a": 1}))}, "peak memory"),
    "stages": (
        {"memory": MemoryRecord(measured=MeasuredMemory(peak_allocated_bytes=1))},
        "memory by stage",
    ),
    "losses": ({"loss": Loss()}, "loss"),
    "bits per byte": ({"loss": Loss(5.0, 4.0, 5.0, 4.0)}, "bits per byte"),
    "kernels": ({"effective": {}}, "computed in"),
    "optimizer": ({"effective": {}}, "optimizer  "),
    "checkpointing": ({"effective": {"layers_recomputed": 0}}, "recomputed"),
    "warnings": ({"warnings": []}, "warning"),
}
"""What was not measured, and the words that must then be absent."""


@pytest.mark.parametrize(("changes", "words"), WITHOUT.values(), ids=WITHOUT.keys())
def test_summary_has_no_line_for_a_missing_value(changes, words):
    text = render_summary(full_record(**changes), FOLDER)
    assert words not in text
    assert "None" not in text
    assert "nan" not in text


def test_cpu_peak_has_no_reserve():
    memory = MeasuredMemory(
        basis="CPU tensor allocator, one profiled step; stages: resident memory of the process",
        peak_allocated_bytes=2**20,
    )
    shown = lines(full_record(memory=MemoryRecord(measured=memory)))
    assert shown["peak memory"].split("  ")[0] == "1.00 MiB"
    assert "CPU tensor allocator" in shown["peak memory"]


COMPILED = {"graphs": 3, "graph_breaks": 0, "recompiles": 1, "compile_s": 12.0}
SKIPPED = {"skipped_steps": 2, "loss_scale": 16384.0}
EFFECTIVE = [
    (
        {"matmul_dtypes": ["float32"], "attention_kernels": []},
        "computed in",
        "float32 attention: plain matrix multiplications",
    ),
    (
        {
            "optimizer": "Adafactor",
            "optimizer_implementation": "",
            "optimizer_bytes_per_parameter": 0.0312,
        },
        "optimizer",
        "Adafactor 0.0312 bytes of state per parameter",
    ),
    (
        {"float8_layers": 13, "linear_layers": 15, "float8_emulated": True},
        "float8",
        "in 13 of 15 linear layers emulated",
    ),
    (SKIPPED, "skipped", "2 steps gradients overflowed; loss scale 16384 at the end"),
    ({**SKIPPED, "skipped_steps": 0}, "skipped", ""),
    (
        {"compile": COMPILED},
        "compiled",
        "3 graphs 12 s compiling; 0 graph breaks, 1 recompilations",
    ),
    (
        {"compile": {**COMPILED, "cache_hits": 3, "cache_misses": 1}},
        "compiled",
        "3 graphs 12 s compiling; 0 graph breaks, 1 recompilations, 3 of 4 passes from the cache",
    ),
]


@pytest.mark.parametrize(("effective", "name", "text"), EFFECTIVE)
def test_summary_shows_effective_settings(effective, name, text):
    shown = lines(full_record(effective=effective))
    assert " ".join(shown.get(name, "").split()) == text


def test_shared_device_hides_speed():
    text = render_summary(full_record(shared_device=True), FOLDER)
    assert "no speed above is a measurement" in text
    for unshared in (False, None):
        assert "measurement" not in render_summary(full_record(shared_device=unshared), FOLDER)


# --- predicted memory ----------------------------------------------------------------------------


def test_summary_compares_predicted_with_measured_memory():
    predicted = PredictedMemory(1, 2, 3, {}, "closed_form", "tensors", 3 * 2**30)
    measured = MeasuredMemory(basis="b", peak_allocated_bytes=4 * 2**30)
    text = render_summary(full_record(memory=MemoryRecord(predicted, measured)), FOLDER)
    assert "predicted" in text
    assert "-25.0% of " in text
    memory = MemoryRecord(PredictedMemory(1, 2, 3), measured)  # nothing of it is comparable
    assert "predicted" not in render_summary(full_record(memory=memory), FOLDER)


def timed(record, **more) -> str:
    record.timing.predicted_step_s = PredictedStep(0.5, 0.8, 2.0, **more)
    record.timing.steady_step_s = Spread(1.0, 0.9, 1.1, 10)
    return render_summary(record, FOLDER)


def test_summary_compares_predicted_with_measured_step():
    assert "-20% of " in timed(full_record())
    by = CalibratedStep(runs=7, needed=5, factor=1.5)
    assert "; calibrated by 7 runs" in timed(full_record(), calibrated=by)
    record = full_record()
    record.shared_device = True
    assert "predicted step" not in timed(record)
    assert "predicted step" not in render_summary(full_record(), FOLDER)


@pytest.mark.parametrize(
    ("measured", "had"),
    [
        (MeasuredMemory(process_peak_bytes=5 * 2**30), "5.00 GiB"),
        (MeasuredMemory(peak_reserved_bytes=7 * 2**30, process_peak_bytes=2**30), "7.00 GiB"),
    ],
    ids=["a process", "a GPU"],
)
def test_summary_of_an_oom_run_gives_memory_and_advice(measured, had):
    advice = ["batch.per_device=4 batch.accumulation=2"]
    memory = MemoryRecord(PredictedMemory(2**30, 2**31, 2**32), measured, advice)
    text = render_summary(full_record(outcome="oom", memory=memory), FOLDER)
    assert "would need less" in text
    assert advice[0] in text
    assert "1.00 GiB to 4.00 GiB" in text
    lines = text.splitlines()
    assert [line.split()[:3] for line in lines if line.split()[:1] == ["had"]] == [
        ["had", *had.split()]
    ]
    assert "  had " not in render_summary(full_record(memory=memory), FOLDER)
