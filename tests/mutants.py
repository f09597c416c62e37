"""Planted faults: 40 changes of src that break a promise, each with the tests that see it.

    python tests/mutants.py list            the table of tests/mutants.md
    python tests/mutants.py write           writes that file
    python tests/mutants.py plant ID        changes this working tree; `undo` changes it back
    python tests/mutants.py check [ID...]   plants one after the other in a temporary copy

`check` exits with 1 if a fault survives its tests.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TABLE = REPO / "tests" / "mutants.md"


@dataclass(frozen=True)
class Fault:
    """One wrong expression."""

    id: str
    file: str
    """Below src/eke."""
    old: str
    """As it stands once in the file."""
    new: str
    """What is planted; the file has it nowhere else."""
    breaks: str
    tests: tuple[str, ...]
    """The smallest set that sees it, below tests/."""

    @property
    def path(self) -> Path:
        """Of the file, in a tree's root."""
        return Path("src/eke", self.file)


def fault(name: str, file: str, old: str, new: str, breaks: str, *tests: str) -> Fault:
    """A row of the table."""
    return Fault(name, file, old, new, breaks, tests)


FAULTS = (
    fault(
        "file_not_synced",
        "common/files.py",
        "os.fsync(file.fileno())",
        "os.isatty(file.fileno())",
        "a record written before a power cut may be empty",
        "unit/common/test_files.py::test_content_is_synced_before_the_rename_and_the_folder_after",
    ),
    fault(
        "folder_not_synced",
        "common/files.py",
        "os.fsync(folder)",
        "abs(folder)",
        "a rename may be undone by a power cut",
        "unit/common/test_files.py::test_content_is_synced_before_the_rename_and_the_folder_after",
    ),
    fault(
        "lock_is_shared",
        "common/files.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | 4",
        "two processes hold one run or one GPU",
        "unit/launch/test_folder.py::test_second_process_is_rejected_with_the_owner",
    ),
    fault(
        "short_write_lost",
        "common/files.py",
        "data = data[os.write(descriptor, data) :]",
        'data = data[:0] if os.write(descriptor, data) else b""',
        "the rest of a line that a full disk took in part is dropped in silence",
        "unit/common/test_files.py::test_partial_append_is_an_error",
    ),
    fault(
        "newest_checkpoint_pruned",
        "training/checkpoint.py",
        "sorted(written, reverse=True)[keep:]",
        "sorted(written)[keep:]",
        "the newest checkpoint is deleted in place of the oldest",
        "unit/training/checkpoint/test_checkpoint.py::test_only_the_newest_checkpoints_are_kept",
    ),
    fault(
        "damage_unseen",
        "training/checkpoint.py",
        "if _checksum(file) != checksum:",
        "if not _checksum(file) | 1:",
        "a damaged checkpoint is loaded",
        "unit/training/checkpoint/test_checkpoint.py::test_damaged_checkpoint_is_skipped_with_a_warning",
    ),
    fault(
        "random_state_of_rank_0",
        "training/checkpoint.py",
        "restore_random_state(states[ranks.rank])",
        "restore_random_state(states[0])",
        "after a resume every rank draws the same dropout masks",
        "unit/training/checkpoint/test_checkpoint.py::test_each_rank_restores_its_random_state",
    ),
    fault(
        "state_cast_on_load",
        "training/checkpoint.py",
        "mine[key].dtype != value.dtype",
        "mine[key].shape != value.shape",
        "a resumed run has rounded optimizer state",
        "equivalence/test_precision.py::test_run_resumes_bit_exact",
    ),
    fault(
        "older_attempt_wins",
        "plan/record/metrics.py",
        "row.get(ATTEMPT, 0) >= best[step].get(ATTEMPT, 0)",
        "row.get(ATTEMPT, 0) < best[step].get(ATTEMPT, 0)",
        "steps repeated after a resume are reported as they were before it",
        "unit/plan/record/test_metrics.py::test_highest_attempt_of_each_step_is_used",
    ),
    fault(
        "tracker_repeats_a_step",
        "results/trackers/async_tracker.py",
        "> self.seen.get(_kind_of(row), -1)",
        ">= self.seen.get(_kind_of(row), -1)",
        "the tracker gets a step twice after a resume",
        "unit/results/trackers/test_online.py::test_repeated_steps_after_a_resume_are_one_row",
    ),
    fault(
        "torn_store_accepted",
        "data/sources/store.py",
        ".stat().st_size == count *",
        ".stat().st_size >= 0 *",
        "a store cut short by a full disk is trained on",
        "unit/data/preparation/test_stores.py::test_damaged_store_is_rebuilt",
    ),
    fault(
        "changed_data_unseen",
        "data/sources/content_hash.py",
        "found.st_size, found.st_mtime_ns, found.st_ctime_ns",
        "found.st_size, found.st_mtime_ns, 0",
        "data changed by `cp -p` keeps its old identity",
        "unit/data/sources/test_corpus.py::test_changed_file_with_equal_size_and_time_is_detected",
    ),
    fault(
        "intent_not_named",
        "launch/slurm/submit_array.py",
        "    name_in_runs(path, submission)",
        "    pass",
        "a kill during sbatch lets another sweep submit the runs again",
        "unit/launch/slurm/test_submit.py::test_lost_answer_is_not_resubmitted_by_another_sweep",
    ),
    fault(
        "intent_given_up_at_once",
        "launch/slurm/submit_array.py",
        "abs(time.time() - each.created) <= GIVEN_UP_S",
        "abs(time.time() - each.created) > GIVEN_UP_S",
        "runs whose sbatch is still under way are submitted twice",
        "unit/launch/slurm/test_submission.py::test_late_submission_is_adopted",
    ),
    fault(
        "preemption_is_a_crash",
        "launch/slurm/scheduler.py",
        '"PREEMPTED": Outcome.preempted',
        '"PREEMPTED": Outcome.crashed',
        "a preempted run is not continued",
        "unit/launch/slurm/test_states.py::test_every_slurm_state_has_a_meaning",
    ),
    fault(
        "time_rounded_down",
        "launch/slurm/submission_file.py",
        "-(-seconds // 60)",
        "(seconds // 60)",
        "a run gets less time than it asks for",
        "unit/launch/slurm/test_request.py::test_time_limits_are_read_like_sbatch",
    ),
    fault(
        "retries_never_reset",
        "launch/processes/sweep.py",
        "record.steps_done > self.steps_before",
        "record.steps_done < self.steps_before",
        "a run that moves on is given up after a few crashes",
        "unit/launch/test_job.py::test_one_step_per_attempt",
    ),
    fault(
        "rule_never_applies",
        "rules/deepspeed.py",
        "is_zero(f) and f.optimizer.fails_on_zero",
        "is_zero(f) and not f.optimizer.fails_on_zero",
        "ZeRO starts with an optimizer it cannot split",
        "unit/rules/test_rules.py::test_rule_is_found_and_its_fix_is_valid",
    ),
    fault(
        "bf16_on_old_gpus",
        "rules/precision.py",
        "and older_than(f, AMPERE)",
        "and older_than(f, VOLTA)",
        "bfloat16 is allowed on GPUs that emulate it",
        "unit/rules/test_rules.py::test_rule_is_found_and_its_fix_is_valid",
    ),
    fault(
        "lost_updates_allowed",
        "rules/precision.py",
        "config.optimizer.lr < _SMALLEST_STEP",
        "config.optimizer.lr > _SMALLEST_STEP",
        "bfloat16 weights that no step changes are trained",
        "unit/rules/test_rules.py::test_rule_is_found_and_its_fix_is_valid",
    ),
    fault(
        "impossible_only_warned",
        "rules/__init__.py",
        "refused = [rule.problem(facts) for rule in sized if rule.verdict is Severity.impossible]",
        "refused = [rule.problem(facts) for rule in sized[:0]]",
        "a run whose state cannot fit is started",
        "unit/rules/test_rules.py::test_rule_is_found_and_its_fix_is_valid",
    ),
    fault(
        "room_on_the_wrong_side",
        "rules/memory.py",
        "* _MIN_FREE_STATE_RATIO <= memory:",
        "<= memory * _MIN_FREE_STATE_RATIO:",
        "the proposed fix does not fit either",
        "unit/rules/test_peft_rules.py::test_fix_leaves_memory_for_activations",
    ),
    fault(
        "gradients_counted_twice",
        "estimate/memory/peak_by_phase.py",
        "several = self.plan.batch.accumulation > 1",
        "several = self.plan.batch.accumulation > 0",
        "runs that fit are rejected, since gradients are counted in the forward pass",
        "unit/estimate/memory/test_predict.py::test_gradients_are_held_in_forward_only_when_accumulating",
    ),
    fault(
        "high_end_rejects",
        "tuning/check_memory_fit.py",
        "found.peak.low > found.capacity",
        "found.peak.high > found.capacity",
        "runs that may fit are rejected",
        "unit/tuning/test_advice.py::test_tight_run_starts_with_a_warning",
    ),
    fault(
        "low_end_accepts",
        "estimate/memory/auto_batch.py",
        "if peak.high <= self.capacity:",
        "if peak.low <= self.capacity:",
        "batch=auto chooses a batch that runs out of memory",
        "unit/estimate/memory/test_auto.py::test_largest_batch_with_a_fitting_high_end_is_chosen",
    ),
    fault(
        "failed_probe_forgotten",
        "estimate/memory/auto_batch.py",
        "fails = min(size, seen.fails or size)",
        "fails = max(size, seen.fails or size)",
        "a batch that ran out of memory is tried again",
        "unit/estimate/memory/test_auto.py::test_newer_of_contradicting_probes_is_used",
    ),
    fault(
        "bits_taken_for_bytes",
        "estimate/time/rates.py",
        ' * 1e9 / 8, "',
        ' * 1e9, "',
        "a network is taken to be eight times as fast",
        "unit/estimate/time/test_published.py::test_network_comes_from_the_device_or_the_override",
    ),
    fault(
        "cache_counts_twice",
        "hardware/cpu.py",
        "read_text()) - int(stat.get(inactive, 0))",
        "read_text()) + int(stat.get(inactive, 0))",
        "memory that the kernel can take back is refused to runs",
        "unit/hardware/test_cpu.py::test_available_memory_excludes_other_processes",
    ),
    fault(
        "cores_overlap",
        "hardware/processes.py",
        "[number * share % len(cores) for",
        "[number % len(cores) for",
        "runs on one CPU share cores and disturb each other's timings",
        "unit/hardware/test_slots.py::test_cpu_slots_share_no_core",
    ),
    fault(
        "busy_gpu_taken",
        "launch/devices.py",
        "if not self.shared and (why :=",
        "if self.shared and (why :=",
        "a run starts on a GPU that another user computes on",
        "unit/launch/pool/test_devices.py::test_busy_gpu_is_not_leased",
    ),
    fault(
        "oom_of_a_neighbour",
        "launch/processes/sweep_scheduler.py",
        "(job.record and job.record.shared_device)",
        "(job.record and job.record is None)",
        "jobs are skipped after a neighbour on the GPU took the memory",
        "unit/launch/pool/test_dominance.py::test_oom_on_a_shared_device_skips_no_run",
    ),
    fault(
        "arithmetic_changed_unasked",
        "tuning/search/candidates.py",
        "each.numerics in numerics.includes",
        "each.numerics not in ()",
        "eke fit chooses a lower precision that was not allowed",
        "unit/tuning/search/test_candidates.py::test_classes_of_numerics_are_nested",
    ),
    fault(
        "gain_inverted",
        "tuning/search/result.py",
        "devices * before.step_s / after.step_s",
        "devices * after.step_s / before.step_s",
        "eke fit reports a slower configuration as faster",
        "unit/tuning/search/test_found.py::test_only_a_significant_gain_is_written_as_an_option",
    ),
    fault(
        "memory_in_thousands",
        "workflows/auto_batch.py",
        '1024 ** (" KMGT"',
        '1000 ** (" KMGT"',
        "a micro-batch is chosen for less memory than the job gets",
        "unit/workflows/test_batching.py::test_cluster_memory_is_read_like_sbatch",
    ),
    fault(
        "excluded_without_key",
        "config/sweep/exclusion.py",
        'return self.sign == "!="',
        "return False",
        "sweep.exclude keeps runs that it was to leave out",
        "unit/config/compose/test_sweep_expression.py::test_expression_is_evaluated_for_a_run",
    ),
    fault(
        "mean_per_micro_batch",
        "training/loop/step.py",
        "job.update.backward(total_loss(loss), num_targets)",
        "job.update.backward(total_loss(loss), max(1, batch.num_targets))",
        "the gradient grows with gradient accumulation",
        "equivalence/test_accumulation.py::test_micro_batch_size_does_not_change_the_step",
    ),
    fault(
        "gradients_averaged",
        "training/optimizer/update.py",
        "torch.full_like(scaled, self.world_size / num_targets)",
        "torch.full_like(scaled, 1 / num_targets)",
        "more GPUs train with a smaller gradient",
        "unit/training/model/test_clipping.py::test_averaging_ranks_sum_gradients",
    ),
    fault(
        "clipping_inverted",
        "training/optimizer/update.py",
        ".clamp(min=1.0)",
        ".clamp(max=1.0)",
        "gradients are scaled up in place of clipped",
        "unit/training/model/test_clipping.py::test_fused_clipping_matches_separate_clipping",
    ),
    fault(
        "ranks_see_the_same_samples",
        "training/batches/batches.py",
        "return groups[rank::world_size]",
        "return groups[0::world_size]",
        "every rank trains on the samples of rank 0",
        "unit/training/batches/test_batches.py::test_micro_batch_size_changes_no_sample",
    ),
    fault(
        "padding_is_a_target",
        "training/batches/batches.py",
        "num_targets, targets = int(np.count_nonzero(counts))",
        "num_targets, targets = int(counts.size)",
        "the loss is divided by padding, too",
        "unit/training/batches/test_batches.py::test_samples_are_padded_to_the_longest",
    ),
    fault(
        "compiling_is_timed",
        "training/loop/meter.py",
        "note.step < self.timed_from or note.unsteady",
        "note.step < self.timed_from",
        "steps that compile count as speed",
        "unit/training/loop/test_compiled_steps.py::test_late_new_graph_is_detected",
    ),
    fault(
        "bits_per_byte_inverted",
        "training/loop/evaluation.py",
        "row[metrics.BITS_PER_BYTE] = loss / math.log(2)",
        "row[metrics.BITS_PER_BYTE] = loss * math.log(2)",
        "bits per byte are half of what they are",
        "unit/training/loop/test_results.py::test_nats_per_byte_are_converted_to_bits",
    ),
    fault(
        "rows_overfull",
        "data/sources/packing.py",
        "if tree[node] < length:",
        "if tree[node] < length - 1:",
        "packed rows are longer than the model's sequence",
        "unit/training/batches/test_sources.py::test_first_fit_packing",
    ),
    fault(
        "evaluated_on_training_rows",
        "data/preparation/writer.py",
        "repr(row.texts).encode()",
        "repr((number, row.texts)).encode()",
        "equal rows are trained on and evaluated on",
        "unit/data/preparation/test_stores.py::test_split_depends_on_content",
    ),
    fault(
        "evaluated_on_training_text",
        "data/sources/source_files.py",
        "(FileRange(paths[0], cut, size - cut),)",
        "(FileRange(paths[0], 0, size - cut),)",
        "the evaluation loss is that of training text",
        "unit/data/sources/test_corpus.py::test_end_of_a_single_file_is_evaluation",
    ),
    fault(
        "causal_attention_whole",
        "models/sizes/parameters.py",
        "(0.5 if attention.causal else 1)",
        "(1.0 if attention.causal else 1)",
        "model FLOPs and MFU are too high",
        "unit/models/sizes/test_flops.py::test_default_model_flops_match_hand_computed_values",
    ),
    fault(
        "frozen_weights_counted",
        "models/sizes/parameters.py",
        "PER_PARAMETER if weight.trained else _PER_FROZEN_PARAMETER",
        "PER_FROZEN_PARAMETER if weight.trained else _PER_PARAMETER",
        "FLOPs of frozen and trained weights are swapped",
        "unit/models/sizes/test_flops.py::test_flops_formula_matches_the_counter",
    ),
    fault(
        "moments_halved",
        "models/sizes/state.py",
        "lambda w: FLOAT32_BYTES if formats.master else _number_bytes(formats, w)",
        "lambda w: _number_bytes(formats, w)",
        "the state of float32 masters is forecast at half its size",
        "unit/models/sizes/test_state.py::test_master_copy_optimizer_has_float32_moments",
    ),
    fault(
        "peak_with_sparsity",
        "hardware/datasheets.py",
        "(66.9, 494.7, 989.4)",
        "(66.9, 494.7, 1978.9)",
        "MFU on an H100 is half of what it is",
        "unit/hardware/test_device_table.py::test_peak_is_dense_with_float32_accumulation",
    ),
    fault(
        "identity_without_length",
        "plan/identity.py",
        '"data": ("max_row_bytes",)',
        '"data": ("max_row_bytes", "seq_len")',
        "a run is answered by the record of another sequence length",
        "unit/plan/test_identity.py::test_every_key_except_presentation_changes_the_run_id",
    ),
    fault(
        "short_last_step_lost",
        "plan/planner/planner.py",
        "math.ceil(train / batch.samples_per_step)",
        "math.floor(train / batch.samples_per_step)",
        "an epoch leaves out its last samples",
        "unit/plan/test_make.py::test_epochs_are_converted_to_steps",
    ),
    fault(
        "devices_multiply",
        "plan/record/metrics.py",
        "each * rate / num_devices",
        "each * rate * num_devices",
        "FLOP/s per device grow with the number of devices",
        "unit/plan/record/test_derive.py::test_throughput_is_samples_over_seconds_of_steady_steps",
    ),
    fault(
        "old_software_answers",
        "launch/processes/run_dir.py",
        "if named or (not changes and not again):",
        "if named or not again:",
        "a run is answered by a record of other software",
        "unit/launch/test_folder.py::test_other_machine_gets_a_new_folder_and_the_difference_is_named",
    ),
    fault(
        "no_correction",
        "results/report/compare/statistics.py",
        "levels[key] = level / left",
        "levels[key] = level",
        "one of many comparisons is significant by chance",
        "unit/results/report/test_statistics.py::test_many_comparisons_widen_intervals",
    ),
    fault(
        "error_of_one_repeat",
        "results/report/compare/statistics.py",
        "max(_variance(differences), floor) / n, n - 1)",
        "max(_variance(differences), floor), n - 1)",
        "intervals do not shrink with repeats",
        "unit/results/report/test_statistics.py::test_matching_repeats_are_paired",
    ),
    fault(
        "default_clipping",
        "config/schema/data.py",
        "default=1.0, metadata=Key.LEARNING | above(0, null",
        "default=10.0, metadata=Key.LEARNING | above(0, null",
        "gradients are clipped ten times later than documented",
        "unit/plan/test_identity.py::test_golden_run_ids",
    ),
    fault(
        "retry_forgets",
        "cli/run_commands.py",
        "kept[paths.record] = name",
        "kept[paths.record] = paths.record",
        "eke retry that starts nothing loses the records it has set aside",
        "unit/cli/test_folders_acting.py::test_retry_restores_records_if_the_command_fails",
    ),
)


SURVIVED = (
    "folder_not_synced",
    "random_state_of_rank_0",
    "cores_overlap",
    "memory_in_thousands",
    "gradients_averaged",
    "bits_per_byte_inverted",
    "moments_halved",
    "gradients_counted_twice",
    "room_on_the_wrong_side",
)


def planted(text: str, each: Fault) -> str:
    """The text of a file with the fault in it.

    Raises:
        ValueError: the old text does not stand there once, or the new one already does.
    """
    if text.count(each.old) != 1 or each.new in text.replace(each.old, ""):
        raise ValueError(f"{each.id}: {each.path} has {each.old!r} {text.count(each.old)} times")
    return text.replace(each.old, each.new)


def plant(each: Fault, root: Path = REPO) -> None:
    """Put a fault into a tree."""
    path = root / each.path
    path.write_text(planted(path.read_text(), each))


def undo(root: Path = REPO) -> list[str]:
    """Take every planted fault out of a tree; returns their ids."""
    found = []
    for each in FAULTS:
        path = root / each.path
        text = path.read_text()
        if text.count(each.old) == 0 and text.count(each.new) == 1:
            path.write_text(text.replace(each.new, each.old))
            found.append(each.id)
    return found


def table() -> str:
    """All faults as Markdown."""
    lines = [
        "# Planted faults",
        "",
        "Each of these is a change of one expression in `src/eke`, planted one at a time.",
        "`python tests/mutants.py plant ID` makes one, `undo` takes it back, and `check` plants",
        "all of them in a temporary copy and runs the tests named here. This table is written by",
        "`python tests/mutants.py write`.",
        "",
        "When the list was made, no test of their packages saw " + ", ".join(SURVIVED) + ":",
        "they have tests now.",
        "",
        "| fault | file | what breaks | seen by |",
        "|---|---|---|---|",
    ]
    for each in FAULTS:
        seen = ", ".join(f"`{test}`" for test in each.tests)
        lines.append(f"| {each.id} | {each.file} | {each.breaks} | {seen} |")
    return "\n".join(lines) + "\n"


def copied(root: Path) -> Path:
    """A copy of the working tree's files that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPO, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (REPO / name).exists():  # one that is deleted and not committed yet is listed, too
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, root / name, follow_symlinks=False)
    return root


def run_tests(root: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The tests of a tree, up to the first that fails."""
    options = ["-x", "-q", "-m", "", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip


def check(chosen: list[Fault]) -> int:
    """Plant each fault and run its tests; 1 if one survives."""
    survived = []
    with tempfile.TemporaryDirectory(prefix="eke-faults-") as folder:
        root = copied(Path(folder))
        sound = run_tests(
            root, tuple(dict.fromkeys(test for each in chosen for test in each.tests))
        )
        if sound.returncode:
            sys.stderr.write(f"tests fail without a fault:\n{sound.stdout[-3000:]}")
            return 2
        for each in chosen:
            before = (root / each.path).read_text()
            plant(each, root)
            done = run_tests(root, each.tests)
            (root / each.path).write_text(before)
            if done.returncode not in (0, 1):
                sys.stderr.write(done.stdout[-3000:] + done.stderr[-1000:])
                return 2
            by = [line.split()[1] for line in done.stdout.splitlines() if line[:7] == "FAILED "]
            sys.stdout.write(f"{each.id}: {'seen by ' + by[0] if by else 'SURVIVED'}\n")
            sys.stdout.flush()
            survived += [] if by else [each.id]
    sys.stdout.write(f"{len(chosen) - len(survived)} of {len(chosen)} seen\n")
    return 1 if survived else 0


def main(arguments: list[str]) -> int:
    """Parse and do; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["list", "write", "plant", "undo", "check"])
    parser.add_argument("id", nargs="*", help="of a fault; all of them for check")
    options = parser.parse_args(arguments)
    known = {each.id: each for each in FAULTS}
    if unknown := [name for name in options.id if name not in known]:
        parser.error(f"no fault {', '.join(unknown)}")
    chosen = [known[name] for name in options.id]
    if options.command == "check":
        return check(chosen or list(FAULTS))
    if options.command == "plant":
        for each in chosen:
            plant(each)
    elif options.command == "undo":
        sys.stdout.write("".join(f"{name}\n" for name in undo()))
    elif options.command == "write":
        TABLE.write_text(table())
    else:
        sys.stdout.write(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
