"""What the plan decides, with the numbers worked out by hand and the reason beside each."""

import pytest
from support import last_wins
from unit.plan.cases import CPU, GPU, SYNTHETIC, decision, plan_of
from unit.plan.record.samples import step_row

from eke.common.errors import ConfigError
from eke.models.sizes import optimizer_entry
from eke.plan.planner import Decision, outline_record
from eke.plan.record import Outcome

# --- batch --------------------------------------------------------------------------------------


def test_target_is_divided_into_micro_batches() -> None:
    plan = plan_of(*SYNTHETIC, "batch.per_device=4", "batch.target=24")
    assert plan.batch.accumulation == 6
    assert plan.batch.samples_per_step == 24
    assert decision(plan, "batch.accumulation") == ("6", "batch.target 24 / (4 x 1 processes)")
    assert decision(plan, "samples per step")[0] == "24"


def test_processes_share_the_target() -> None:
    three = ("batch.per_device=4", "batch.target=24", "distributed.num_processes=3")
    plan = plan_of(*SYNTHETIC, *three)
    assert (plan.batch.accumulation, plan.batch.world_size) == (2, 3)
    assert plan.batch.samples_per_step == 24
    assert "3 processes" in decision(plan, "batch.accumulation")[1]


def test_batch_without_target_has_no_derived_values() -> None:
    plan = plan_of(*SYNTHETIC, "batch.per_device=4", "batch.accumulation=3")
    assert (plan.batch.accumulation, plan.batch.samples_per_step) == (3, 12)
    assert decision(plan, "batch.accumulation") is None
    assert decision(plan, "samples per step")[1] == "4 per device x 3 accumulated x 1 processes"


@pytest.mark.parametrize(
    ("typed", "expected"), [((), 4), (("batch.eval_per_device=16",), 16)], ids=["open", "typed"]
)
def test_evaluation_batch_is_decided(typed, expected) -> None:
    assert plan_of(*SYNTHETIC, "batch.per_device=4", *typed).batch.eval_per_device == expected


# --- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "per_device", "epochs", "per_epoch", "total", "told"),
    [
        (64, 8, 2, 8, 16, "2 epochs of 8 steps"),
        (65, 8, 2, 9, 18, "2 epochs of 9 steps"),
        (64, 8, 0.5, 8, 4, "0.5 epochs of 8 steps"),
        (8, 8, 1, 1, 1, "1 epoch of 1 step"),
        (64, 8, 1e-4, 8, 1, "0.0001 epochs of 8 steps"),
    ],
    ids=["even", "uneven last step", "half", "one step", "never none at all"],
)
def test_epochs_are_converted_to_steps(samples, per_device, epochs, per_epoch, total, told) -> None:
    size = f"data.num_samples={samples}", f"batch.per_device={per_device}"
    plan = plan_of("data=synthetic", *size, f"train.epochs={epochs}")
    assert (plan.steps.per_epoch, plan.steps.total) == (per_epoch, total)
    assert decision(plan, "train.steps") == (str(total), told)


def test_explicit_steps_need_no_decision() -> None:
    plan = plan_of(*SYNTHETIC)
    assert plan.steps.total == 20
    assert decision(plan, "train.steps") is None
    assert decision(plan, "data.num_samples") is None


def test_default_length_is_a_decision() -> None:
    plan = plan_of("data=synthetic")
    assert plan.steps.total == 300
    told = "300", "default without train.steps and train.epochs"
    assert decision(plan, "train.steps") == told
    assert plan.steps.num_train_samples == 512, "the guides' data set size"
    assert decision(plan, "data.num_samples") == ("512", "dataset size of the guides")


@pytest.mark.parametrize(
    ("typed", "warmup", "decided"),
    [
        (("schedule.warmup_frac=0.1",), 2, True),
        (("schedule.warmup_frac=0",), 0, True),
        (("schedule.warmup_steps=7",), 7, False),
        (("schedule.warmup_steps=0",), 0, False),
        (("schedule.warmup_steps=20",), 20, False),
    ],
    ids=["share", "no share", "steps", "none", "the whole run"],
)
def test_warm_up_steps_are_decided(typed, warmup, decided) -> None:
    plan = plan_of(*SYNTHETIC, *typed)
    assert plan.steps.warmup == warmup
    assert (decision(plan, "schedule.warmup_steps") is not None) == decided


IMPOSSIBLE = {
    "warm-up longer than the run": (
        ("schedule.warmup_steps=6", "train.epochs=0.5", "train.steps=null"),
        "schedule.warmup_steps", "4 steps"),
    "step larger than the data": (
        ("batch.per_device=40", "batch.accumulation=2"),
        "batch.per_device", "80 samples per step, only 64"),
    "micro-batch larger than the data": (("batch.per_device=65",), "batch.per_device", "65 sam"),
    "target larger than the data": (("batch.target=72",), "batch.target", "72 samples"),
    "more processes than samples": (
        ("distributed=ddp", "distributed.num_processes=65"), "batch.per_device",
        "only 64"),
    "too many steps": (("train.epochs=1e300", "train.steps=null"), "train.epochs", "the limit is"),
}  # fmt: skip
"""What only the size of the data makes impossible: overrides, key path of the problem, reason."""


@pytest.mark.parametrize(("typed", "path", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_lengths_are_rejected_with_a_valid_fix(typed, path, words) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(*last_wins(*SYNTHETIC, *typed))
    (problem,) = caught.value.problems
    assert problem.key == path
    assert words in problem.why
    plan_of(*last_wins(*SYNTHETIC, *typed, *problem.overrides))


# --- text ---------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path):
    """1000 bytes, of which the last 100 are kept for evaluation."""
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(32, 132)) * 10)
    return f"data.path={path}"


def test_samples_of_a_text_are_counted(text) -> None:
    plan = plan_of("data=text", text, "data.seq_len=50")
    assert plan.steps.num_train_samples == 901 // 50, "900 bytes and a separator"
    assert plan.steps.num_eval_samples == 101 // 50, "less than the 64 that were asked for"
    value, reason = decision(plan, "data.num_samples")
    assert value == "18"
    assert "50 tokens" in reason


def test_surplus_sample_request_is_noted(text) -> None:
    plan = plan_of("data=text", text, "data.seq_len=50", "data.num_samples=1000")
    assert plan.steps.num_train_samples == 18
    assert "1000 were requested" in decision(plan, "data.num_samples")[1]


@pytest.mark.parametrize(
    ("seq_len", "part"), [(102, "evaluation"), (2000, "training")], ids=["tail", "all"]
)
def test_text_shorter_than_a_sample_is_rejected(seq_len, part, text) -> None:
    with pytest.raises(ConfigError, match=f"the {part} text is shorter") as caught:
        plan_of("data=text", text, f"data.seq_len={seq_len}")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("data.seq_len", str(seq_len))
    assert plan_of("data=text", text, str(problem.fix)).steps.num_eval_samples > 0


# --- compute ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "autocast", "scaling"),
    [("fp32", None, False), ("bf16", "bfloat16", False), ("fp16", "float16", True)],
)
def test_compute_formats_are_decided(typed, autocast, scaling) -> None:
    plan = plan_of(*SYNTHETIC, f"precision={typed}")
    assert (plan.compute.autocast, plan.compute.loss_scaling) == (autocast, scaling)
    assert (decision(plan, "loss scaling") is not None) == scaling


def test_pure_bfloat16_needs_no_cast() -> None:
    plan = plan_of(*SYNTHETIC, "precision=bf16_pure")
    assert (plan.compute.autocast, plan.compute.weights) == (None, "bfloat16")
    assert plan.compute.matmul == "bfloat16"
    assert not plan.compute.master
    value, reason = decision(plan, "precision.master")
    assert value == "off"
    assert "4 bytes per parameter" in reason


@pytest.mark.parametrize(
    ("typed", "resolved"),
    [
        (("precision=fp32",), None),
        (("precision=bf16",), "bfloat16"),
        (("precision=bf16_pure",), None),
        (("precision=fp32", "precision.evaluation=float16"), "float16"),
        (("precision=bf16", "precision.evaluation=float32"), None),
    ],
    ids=str,
)
def test_evaluation_format_is_decided(typed, resolved) -> None:
    assert plan_of(*SYNTHETIC, *typed).compute.eval_autocast == resolved


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("precision.master=auto", "precision.master=off"),
        ("precision.evaluation=same", "precision.evaluation=bfloat16"),
    ],
)
def test_equivalent_format_settings_are_one_run(one, other) -> None:
    ids = [plan_of(*SYNTHETIC, "precision=bf16_pure", typed).run_id for typed in (one, other)]
    assert ids[0] == ids[1] != plan_of(*SYNTHETIC, "precision=bf16").run_id


@pytest.mark.parametrize(
    ("typed", "known"),
    [(("precision=bf16_pure",), True), (("precision=fp8",), False), (("precision=fp32",), True)],
    ids=str,
)
def test_mfu_peak_follows_the_compute_format(typed, known) -> None:
    """No device of eke's table has a float8 peak yet, and bfloat16's would flatter."""
    plan = plan_of(*SYNTHETIC, *typed, device=GPU)
    rows = [step_row(number) for number in range(1, 30)]
    record = outline_record(plan, rows, 0, Outcome.ok, None)
    assert (record.throughput.mfu_frac is not None) == known


@pytest.mark.parametrize(
    ("typed", "on", "decided"), [("auto", False, True), ("on", True, False), ("off", False, False)]
)
def test_tf32_is_decided(typed, on, decided) -> None:
    plan = plan_of(*SYNTHETIC, f"precision.tf32={typed}", device=GPU)
    assert plan.compute.tf32 is on
    assert (decision(plan, "precision.tf32") is not None) == decided


@pytest.mark.parametrize(
    ("typed", "device", "pinned"),
    [("auto", GPU, True), ("auto", CPU, False), ("on", GPU, True), ("off", GPU, False),
     ("on", CPU, False)],
    ids=["auto-gpu", "auto-cpu", "on-gpu", "off-gpu", "on-cpu"],
)  # fmt: skip
def test_pinned_memory_is_decided(typed, device, pinned) -> None:
    plan = plan_of(*SYNTHETIC, f"dataloader.pin_memory={typed}", device=device)
    assert plan.compute.pin_memory is pinned


@pytest.mark.parametrize(
    ("option", "implementation", "decided"),
    [
        ("adamw", "fused", True),
        ("adamw_forloop", "forloop", False),
        ("adamw_foreach", "foreach", False),
        ("adamw_fused", "fused", False),
        ("adafactor", "", False),
        ("sgd", "", False),
    ],
)
def test_optimizer_implementation_is_decided(option, implementation, decided) -> None:
    plan = plan_of(*SYNTHETIC, f"optimizer={option}")
    assert plan.compute.optimizer_implementation == implementation
    assert (decision(plan, "optimizer implementation") is not None) == decided


@pytest.mark.parametrize("name", ["fused", "foreach", "forloop", "apex"])
def test_implementation_follows_the_option_name(name) -> None:
    """All that is planned is the same but the run's name: earlier runs keep theirs."""
    option = {"apex": "adamw_apex_fused"}.get(name, f"adamw_{name}")
    typed = plan_of(*SYNTHETIC, f"optimizer.implementation={name}", device=GPU)
    former = plan_of(*SYNTHETIC, f"optimizer={option}", device=GPU)
    assert typed.compute == former.compute
    assert typed.decisions == former.decisions
    assert optimizer_entry(typed.config.optimizer) is optimizer_entry(former.config.optimizer)
    assert typed.run_id != former.run_id
    same = plan_of(*SYNTHETIC, device=GPU).run_id
    assert (typed.run_id == same) == (name == "fused"), "what auto chooses"


# --- the whole ----------------------------------------------------------------------------------


def test_every_decision_has_a_value_and_a_reason() -> None:
    plan = plan_of("data=synthetic", "batch.target=16", "precision=fp16", "precision.tf32=auto")
    keys = [d.key for d in plan.decisions]
    assert keys == [
        "hardware", "batch.accumulation", "samples per step", "data.num_samples", "train.steps",
        "schedule.warmup_steps", "loss scaling", "precision.tf32", "optimizer implementation",
        "learning rate",
    ]  # fmt: skip
    assert all(d.value and d.reason for d in plan.decisions)


def test_plan_name_holds_the_overrides() -> None:
    assert plan_of(*SYNTHETIC).name == " ".join(SYNTHETIC)
    assert plan_of().name == "defaults"
    plan = plan_of(*SYNTHETIC, warnings=["no effect"])
    assert plan.warnings == ("no effect",)
    assert plan.decisions[0] == Decision("hardware", "test cpu", "given")


@pytest.mark.parametrize("task", ["causal_lm", "seq2seq_lm"])
def test_short_text_is_answered_with_a_valid_length(task, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("word " * 60)
    model = "tiny_t5" if task == "seq2seq_lm" else "tiny"
    typed = ("data=text", f"data.path={tmp_path / 'a.txt'}", f"task={task}", f"model={model}",
             "batch.per_device=1", "train.steps=1")  # fmt: skip
    with pytest.raises(ConfigError, match="shorter than one sample") as caught:
        plan_of(*typed, "data.seq_len=512")
    fix = str(caught.value.problems[0].fix)
    assert fix == ("data.seq_len=15" if task == "seq2seq_lm" else "data.seq_len=31")
    assert plan_of(*typed, fix).steps.num_eval_samples == 1


def test_class_folders_are_named(tmp_path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        for n in range(12):
            (tmp_path / folder / f"{n}.txt").write_text("text " * 5 ** (1 + "acb".index(folder)))
    typed = ("data=text", f"data.path={tmp_path}", "data.seq_len=16", "data.eval_frac=0.4")
    value, reason = decision(plan_of(*typed, "task=sequence_classification"), "data.label")
    assert value == "b=0 c=1"
    assert reason == "the largest folders (other text is excluded): b, c"


@pytest.mark.parametrize(
    "drawn",
    ["data.data_seed=1", "data.min_token=101", "data.max_token=200", "data.lengths=uniform"],
)
def test_synthetic_data_is_named_by_its_parameters(drawn) -> None:
    """Losses are compared where the names are equal (results/report/compare/curves.py)."""
    name = plan_of(*SYNTHETIC).data_fingerprint
    assert plan_of(*SYNTHETIC, drawn).data_fingerprint != name
    for other in ("seed=5", "optimizer=sgd", "data.length_grouping=true"):
        assert plan_of(*SYNTHETIC, other).data_fingerprint == name
