"""Step times: what takes longer than what, and where the numbers come from."""

from dataclasses import replace
from random import Random

import pytest
from random_configurations import draw_command
from unit.estimate.time.cases import A100, CPU, V100, large, small

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.estimate.time import StepTime, Unknown, memory_traffic
from eke.estimate.time.rates import Span
from eke.estimate.time.time_history import calibrated_step_time
from eke.hardware import DEVICES, Device
from eke.workflows.planning import plan_for


def expected(plan) -> float:
    return calibrated_step_time(plan).step_s.expected


BATCH, PIECES = "batch.per_device=8", ("batch.per_device=1", "batch.accumulation=8")
LONGER = {
    "a larger batch": lambda: (large(), large(BATCH)),
    "longer rows": lambda: (large("data.seq_len=256"), large()),
    "more layers": lambda: (large("model.num_hidden_layers=12"), large()),
    "checkpointing": lambda: (large(), large("memory=checkpointing", "memory.every_n=4")),
    "checkpointing every layer": lambda: (
        large("memory=checkpointing", "memory.every_n=4"),
        large("memory=checkpointing"),
    ),
    "selective checkpointing": lambda: (large(), large("memory=checkpointing_selective")),
    "float32": lambda: (large("precision=bf16"), large("precision=tf32")),
    "float32 without TF32": lambda: (large("precision=tf32"), large("precision=fp32")),
    "float32 on a V100": lambda: (
        large("precision=fp16", device=V100),
        large("precision=fp32", device=V100),
    ),
    "eager attention": lambda: (
        large("precision=bf16"),
        large("precision=bf16", "attention=eager"),
    ),
    "not compiled": lambda: (large("compile=inductor"), large()),
    "activations on the host": lambda: (large(), large("memory=activation_offload")),
    "one tensor at a time": lambda: (large(), large("optimizer=adamw_forloop")),
    "an older device": lambda: (large(), large(device=V100)),
    "the same in pieces": lambda: (small(BATCH), small(*PIECES)),
    "HF Trainer": lambda: (small(), small("engine=trainer")),
}


@pytest.mark.parametrize("name", LONGER)
def test_more_work_has_a_longer_step_time(name) -> None:
    less, more = LONGER[name]()
    assert expected(less) < expected(more)


FOUR = replace(A100, count=4)


def test_offloading_adds_transfers() -> None:
    shared = ("distributed=zero2", "distributed.num_processes=4")
    here = calibrated_step_time(large(*shared, device=FOUR))
    there = calibrated_step_time(large(*shared, "offload=optimizer_cpu", device=FOUR))
    assert here.parts.get("transfers", 0.0) == 0.0
    assert there.parts["transfers"] > 0
    assert there.step_s.expected > here.step_s.expected
    assert any("host's CPU" in note for note in there.notes)


@pytest.mark.parametrize("option", ["ddp", "fsdp", "zero1", "zero2", "zero3", "dp"])
def test_communication_of_several_devices_is_counted(option) -> None:
    alone = calibrated_step_time(large(device=FOUR))
    many = calibrated_step_time(
        large(f"distributed={option}", "distributed.num_processes=4", device=FOUR)
    )
    assert many.parts["communication"] > 0
    # Four devices are at most four times as fast.
    assert many.samples_per_s.low < 4.001 * alone.samples_per_s.high
    assert many.gpu_hours.expected == pytest.approx(4 * many.total_s.expected / 3600)


def test_slower_links_take_longer() -> None:
    two = ("distributed=ddp", "distributed.num_processes=4")
    linked = calibrated_step_time(large(*two, device=FOUR))
    through_host = calibrated_step_time(large(*two, "distributed.p2p=off", device=FOUR))
    assert through_host.parts["communication"] > linked.parts["communication"]


def test_small_steps_are_host_bound_and_gain_from_compiling() -> None:
    tiny = ("batch.per_device=1", "data.seq_len=32", "precision=bf16")
    eager, compiled = (
        calibrated_step_time(small(*tiny)),
        calibrated_step_time(small(*tiny, "compile=inductor")),
    )
    assert eager.limit == "the host's kernel launches"
    assert compiled.parts["host"] < eager.parts["host"] / 2


def test_large_steps_are_compute_bound() -> None:
    found = calibrated_step_time(large("batch.per_device=32", "precision=fp32"))
    assert found.limit == "matrix multiplications"
    assert 0.3 < found.mfu.expected < 1


def test_parts_add_up_and_rates_follow() -> None:
    plan = large("precision=bf16")
    found = calibrated_step_time(plan)
    assert sum(found.parts.values()) == pytest.approx(found.step_s.expected, rel=0.01)
    assert found.samples_per_s.expected == pytest.approx(4 / found.step_s.expected)
    assert found.tokens_per_s.expected == pytest.approx(4 * 512 / found.step_s.expected)
    assert found.total_s.low == pytest.approx(found.step_s.low * plan.steps.total)


def test_ragged_rows_are_shorter_on_average() -> None:
    ragged = ("data.lengths=lognormal", "data.median_len=64")
    assert expected(large(*ragged)) < expected(large())
    found = calibrated_step_time(large(*ragged))
    assert any("differ in length" in note for note in found.notes)
    # The longest of many rows is longer than that of a few.
    few, many = (expected(large(*ragged, f"batch.per_device={n}")) / n for n in (1, 64))
    assert many > few


def test_device_without_datasheet_is_unknown() -> None:
    for device in (CPU, Device(kind="cuda", name="a GPU of tomorrow", memory_bytes=2**35)):
        found = calibrated_step_time(small(device=device))
        assert isinstance(found, Unknown)
        assert "5 finished runs" in found.reason
        assert "\n" not in found.reason


def test_span_ends_are_ordered() -> None:
    with pytest.raises(AssertionError):
        Span(2.0, 1.0, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_configurations_have_ranges_in_order(seed, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a line of text, and another one\n" * 400)
    rng, seen = Random(5000 + seed), 0
    while seen < 12:
        command = draw_command(rng, str(text))
        option = rng.choice(sorted(DEVICES))
        try:
            composed = compose([*dict.fromkeys(command), "plan_only=true"])
            plan = plan_for(composed, planning=True, target=(DEVICES[option], "drawn", 1))
        except ConfigError:
            continue
        found = calibrated_step_time(plan)
        assert isinstance(found, StepTime), command  # a Span refuses ends out of order
        assert found.step_s.low > 0
        assert found.step_s.high < 10_000 * found.step_s.low, command
        seen += 1


@pytest.mark.parametrize(
    ("casts", "gathered"), [("per_use", 883 + 62.5 + 125), ("per_step", 883 + 62.5 + 62.5)]
)
def test_fsdp_sends_16_bit_weights_and_float32_gradients(casts, gathered) -> None:
    """18 layers of 12.8 M numbers twice, head and table once, of 4 bytes half; 4 bytes of all."""
    sizes = "hidden_size=1024 num_hidden_layers=18 num_attention_heads=16 num_key_value_heads=16"
    sizes += " head_dim=64 intermediate_size=2816 vocab_size=32000 tie_word_embeddings=false"
    typed = [
        "model=llama_1b", *(f"model.{each}" for each in sizes.split()), "data=synthetic",
        "precision=bf16", f"precision.casts={casts}", "distributed=fsdp",
        "distributed.num_processes=4", "hardware=h100",
    ]  # fmt: skip
    plan = plan_for(compose(typed), planning=True)
    sent = memory_traffic._exchanged(plan, memory_traffic.Contents(plan.config))[0]
    assert sent / 2**20 == pytest.approx(0.75 * (gathered + 1132), rel=0.01)
