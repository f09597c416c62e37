"""How each rule is shown to be needed: what happens to a run, or a library, without it.

A rule that a new version of a library makes wrong fails its test here.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What the test sees."""

    fails = "without it the run fails"
    wrong = "without it another run than the configured one is trained"
    same = "the run is bit-identical with and without the setting"
    refusal = "the library's own check or table says so"
    numbers = "its numbers, counted or measured"
    gpu = "a test that needs a GPU: `make test-gpu`"
    nowhere = "by no test"


@dataclass(frozen=True)
class Shown:
    """The test of one rule."""

    kind: Kind
    test: str = ""
    """File below `tests`, `::`, function; empty where there is none."""
    reason: str = ""
    """Why there is none, or why it shows less than the rule says."""


HERE = "unit/rules"
BREAKING = f"{HERE}/test_necessity.py::test_without_the_rule_the_run_fails"
SAME = f"{HERE}/test_without_effect.py::test_the_run_is_the_same"

NO_AVAILABLE_KERNEL = "does not take this model's inputs"

FAILS: dict[str, str] = {
    "task_needs_other_model": "bert models have a head for",
    "heads_divide_width": "not a multiple of the number of attention heads",
    "key_value_heads_divide_heads": "must match the size of tensor",
    "rotary_width_is_even": "requires an even rotary dimension",
    "rotary_head_dim_is_even": "requires an even rotary dimension",
    "experts_for_each_token": "k out of range",
    "experts_intermediate_size_is_aligned": "multiple of 16 bytes",
    "dropout_is_known": "must be float, not NoneType",
    "sequence_fits_positions": "expanded size of the tensor",
    "vocabulary_holds_bytes": "index out of range",
    "synthetic_ids_fit": "'from' to be less than 'to'",
    "min_len_within_seq_len": "a rule rejects it",
    "nesterov_needs_momentum": "Nesterov momentum requires a momentum",
    "persistent_needs_workers": "needs num_workers > 0",
    "prefetch_needs_workers": "num_workers > 0",
    "text_exists": "no text",
    "outputs_suit_problem": "is invalid for input of size",
    "padded_fits_positions": "expanded size of the tensor",
    "padding_needs_eps": "the loss is nan",
    "backend_needs_cuda": NO_AVAILABLE_KERNEL,
    "cpu_flash_has_no_dropout": NO_AVAILABLE_KERNEL,
    "learnt_bias_needs_gradient": NO_AVAILABLE_KERNEL,
    "adapted_layers_exist": "names no linear layer",
}
"""Rule -> words of the error that ends the run of its case, with all other rules asked."""


MODEL = f"{HERE}/test_without_model_rules.py"
DATA = f"{HERE}/test_without_data_rules.py"
PRECISION = f"{HERE}/test_without_precision_rules.py"
STEP = f"{HERE}/test_without_step_rules.py"
KERNEL = f"{HERE}/test_without_kernel_rules.py"
RANK = f"{HERE}/test_without_rank_rules.py"
SERVICE = f"{HERE}/test_without_service_rules.py"
ATTENTION = f"{HERE}/test_rules_attention.py"
GPU = "gpu/test_gpu_refusals.py"
ZERO = "equivalence/test_deepspeed.py"
FILES = "equivalence/test_nvme.py"
DISK = f"{HERE}/test_without_nvme_rules.py"

TESTS: dict[tuple[Kind, str], dict[str, str]] = {
    (Kind.fails, MODEL): {
        "experts_hidden_size_is_aligned": "test_experts_of_a_crooked_width_cannot_be_multiplied",
        "synthetic_ids_not_special": "test_special_ids_among_random_ones_end_texts_early",
        "text_readable": "test_a_file_of_another_user_cannot_be_read",
        "runs_writable": "test_below_a_file_there_is_no_run_folder",
    },
    (Kind.wrong, MODEL): {
        "batch_contradiction": "test_a_plan_of_a_batch_that_does_not_divide_is_of_another",
        "target_is_multiple": "test_a_plan_of_a_batch_that_does_not_divide_is_of_another",
        "auto_chooses_micro_batch": "test_beside_auto_what_was_typed_of_the_batch_is_not_kept",
        "auto_derives_accumulation": "test_beside_auto_what_was_typed_of_the_batch_is_not_kept",
        "steps_or_epochs": "test_of_steps_and_epochs_the_plan_would_take_one",
        "warmup_within_run": "test_a_warmup_longer_than_the_run_never_reaches_the_peak",
        "too_short_to_time": "test_a_run_of_warmup_steps_alone_has_no_speed",
        "stretching_needs_long_positions":
            "test_stretching_changes_the_frequencies_of_short_sequences_too",
    },
    (Kind.refusal, MODEL): {
        "more_workers_than_cores":
            "test_pytorch_itself_advises_against_more_loader_processes_than_cores",
    },
    (Kind.wrong, f"{HERE}/test_rules.py"): {
        "t5_is_always_tied":
            "test_without_its_rule_t5_stays_tied_and_loses_the_scale_of_its_logits",
        "untied_bert_has_dead_bias": "test_untied_bert_really_has_a_bias_that_nothing_trains",
    },
    (Kind.fails, "e2e/test_memory_and_disk.py"): {
        "runs_has_space": "test_a_plan_that_cannot_be_written",
        "batch_does_not_fit": "test_running_out_of_memory_is_an_outcome_with_its_phase",
    },
    (Kind.numbers, "unit/models/sizes/test_swapping.py"): {
        "nvme_state_is_large": "test_two_processes_halve_the_files_until_they_are_too_small",
    },
    (Kind.numbers, "unit/models/sizes/test_state.py"): {
        "states_do_not_fit": "test_bytes_are_those_of_the_real_tensors",
    },
    (Kind.fails, DATA): {
        "datasets_missing": "test_tables_are_read_by_datasets",
        "stream_has_no_lengths": "test_a_stream_has_no_lengths",
        "seq2seq_needs_pairs": "test_a_translation_without_columns_has_no_target",
        "chat_needs_a_tokenizer": "test_bytes_have_no_chat_template",
    },
    (Kind.wrong, DATA): {
        "chat_is_causal": "test_masked_lm_predicts_questions_too",
        "stream_needs_steps": "test_an_epoch_of_a_stream_is_as_long_as_the_run",
        "bytes_on_checkpoint": "test_a_checkpoints_tokenizer_numbers_bytes_otherwise",
        "packing_needs_causal_decoder":
            "test_packed_samples_of_a_bidirectional_model_see_each_other",
        "prompt_needs_response": "test_a_prompt_alone_is_trained_on_as_if_it_were_the_text",
        "pair_needs_classifier": "test_a_second_text_is_left_out",
        "problem_needs_labels": "test_numbers_of_folders_are_no_labels_of_a_regression",
        "pairs_need_a_task": "test_pairs_of_a_task_without_them_are_not_read",
    },
    (Kind.numbers, DATA): {
        "lengths_are_counted": "test_every_length_is_drawn_on_its_own",
    },
    (Kind.refusal, PRECISION): {
        "bf16_needs_ampere": "test_pytorch_names_the_same_generation_for_bf16_and_tf32",
        "float8_needs_ada": "test_torchao_names_the_same_generation_for_float8",
        "float8_in_narrow_layers": "test_torchao_leaves_narrow_layers_out_itself",
    },
    (Kind.wrong, PRECISION): {
        "adapters_freeze_everything": "test_with_adapters_a_named_head_is_trained_all_the_same",
        "narrow_weights_need_their_compute":
            "test_narrow_weights_multiply_in_their_own_format_whatever_is_asked_for",
        "frozen_weights_have_the_computed_format":
            "test_frozen_weights_multiply_in_their_own_format_without_autocast",
        "evaluation_has_its_own_format":
            "test_evaluation_in_another_format_than_the_weights_is_in_theirs",
        "casts_are_of_one_process": "test_ranks_do_not_exchange_the_gradients_of_copies",
        "small_updates_are_lost": "test_small_updates_leave_normalisation_weights_where_they_are",
        "t5_overflows_float16": "test_what_float16_cannot_hold_ends_t5_and_bfloat16_holds_it",
        "rowwise_needs_bf16": "test_torchao_rounds_products_with_a_scale_per_row_to_bfloat16",
        "gpt2_has_no_linear_layers": "test_gpt2_and_crooked_widths_have_no_float8_layer",
        "float8_width_is_aligned": "test_gpt2_and_crooked_widths_have_no_float8_layer",
        "float8_feed_forward_is_aligned": "test_crooked_feed_forwards_stay_as_they_are",
    },
    (Kind.fails, PRECISION): {
        "float8_needs_torchao": "test_float8_layers_are_torchaos",
    },
    (Kind.numbers, PRECISION): {
        "float8_is_emulated":
            "test_without_a_compiler_float8_adds_operations_and_on_a_cpu_no_float8_product",
        "float8_needs_compile":
            "test_without_a_compiler_float8_adds_operations_and_on_a_cpu_no_float8_product",
        "tensor_cores_like_vocab_size": "test_units_of_tensor_cores_are_the_bytes_of_nvidias_table",
        "tensor_cores_like_hidden_size":
            "test_units_of_tensor_cores_are_the_bytes_of_nvidias_table",
        "tensor_cores_like_intermediate_size":
            "test_units_of_tensor_cores_are_the_bytes_of_nvidias_table",
        "tensor_cores_like_token_count":
            "test_units_of_tensor_cores_are_the_bytes_of_nvidias_table",
    },
    (Kind.fails, "unit/training/model/test_optimizer.py"): {
        "muon_needs_matrices": "test_muon_without_such_a_matrix_says_what_to_type",
    },
    (Kind.wrong, f"{HERE}/test_optimizer_rules.py"): {
        "all_tensors_are_too_small_for_8_bits": "test_of_small_tensors_nothing_is_quantised",
        "rank_saves_nothing": "test_from_the_rank_that_the_rule_names_on_states_are_no_smaller",
    },
    (Kind.refusal, STEP): {
        "torchao_needs_volta": "test_inductor_refuses_what_is_older_than_volta",
        "inductor_needs_volta": "test_inductor_refuses_what_is_older_than_volta",
        "torchao_needs_compiler": "test_inductor_needs_a_compiler_on_a_cpu",
        "inductor_needs_compiler": "test_inductor_needs_a_compiler_on_a_cpu",
        "cudagraphs_need_cuda": "test_cuda_graphs_of_a_cpu_are_skipped",
        "graph_modes_need_cuda": "test_the_mode_that_replays_graphs_is_only_that",
        "graphs_take_one_micro_batch": "test_the_memory_of_graphs_is_taken_with_the_next_forward",
        "graphs_take_the_whole_model": "test_the_memory_of_graphs_is_taken_with_the_next_forward",
        "declared_device_is_absent": "test_a_declared_gpu_is_not_this_machine",
        "in_backward_is_one_process": "test_ranks_exchange_gradients_after_the_weights_own_hooks",
    },
    (Kind.wrong, STEP): {
        "mode_is_inductors": "test_other_compilers_are_not_told_the_mode",
        "rounding_needs_bf16_weights": "test_stochastic_rounding_of_float32_weights_is_plain_adamw",
        "schedule_free_has_no_schedule": "test_an_average_stays_behind_when_the_rate_falls_too",
        "in_backward_cannot_clip": "test_in_the_backward_pass_nothing_is_clipped",
        "in_backward_cannot_accumulate": "test_in_the_backward_pass_each_micro_batch_is_a_step",
        "in_backward_cannot_scale": "test_in_the_backward_pass_no_loss_is_scaled",
        "in_backward_needs_parts":
            "test_a_backward_pass_that_is_compiled_whole_returns_all_gradients_together",
    },
    (Kind.fails, STEP): {
        "in_backward_without_copies":
            "test_in_the_backward_pass_copies_are_no_weights_of_the_model",
    },
    (Kind.gpu, GPU): {
        "flash_takes_no_mask": "test_a_kernel_that_was_pinned_refuses",
        "kernel_needs_16_bits": "test_a_kernel_that_was_pinned_refuses",
        "kernel_head_is_narrow": "test_a_kernel_that_was_pinned_refuses",
        "kernel_head_is_aligned": "test_a_kernel_that_was_pinned_refuses",
        "cudnn_dropout_in_sixteenths": "test_a_kernel_that_was_pinned_refuses",
        "kernel_needs_ampere": "test_an_older_gpu_has_no_flash_kernel",
        "flex_needs_compiler": "test_triton_needs_a_compiler_of_c",
        "liger_needs_compiler": "test_triton_needs_a_compiler_of_c",
    },
    (Kind.refusal, ATTENTION): {
        "attention_is_implemented": "test_transformers_refuses_what_a_class_does_not_have",
        "flash_package_without_t5": "test_transformers_refuses_what_the_rules_refuse",
        "flex_without_gpt2": "test_transformers_refuses_what_the_rules_refuse",
        "flex_has_no_dropout": "test_flex_refuses_dropout",
        "flex_needs_volta": "test_pytorch_has_no_backward_pass_of_flex_on_a_cpu",
    },
    (Kind.refusal, KERNEL): {
        "flash_package_needs_ampere": "test_flash_attention_refuses_a_cpu",
        "flash_package_needs_16_bits": "test_float32_is_handed_to_flash_attention_as_it_is",
        "flash3_has_no_dropout": "test_dropout_is_left_out_where_the_package_has_none",
        "flash_package_packs_one_row": "test_packed_rows_are_found_in_a_batch_of_one_only",
    },
    (Kind.wrong, KERNEL): {
        "fused_loss_needs_known_head":
            "test_a_fused_head_leaves_out_what_a_model_does_with_its_logits",
        "sparse_prediction_needs_known_head":
            "test_a_fused_head_leaves_out_what_a_model_does_with_its_logits",
        "sparse_prediction_needs_whole_batches":
            "test_places_of_a_whole_batch_mean_others_in_its_parts",
    },
    (Kind.numbers, KERNEL): {
        "sparse_prediction_needs_missing_labels": "test_causal_text_has_a_label_nearly_everywhere",
        "sparse_prediction_changes_shapes": "test_each_step_has_another_number_of_labels",
    },
    (Kind.wrong, "unit/training/model/test_kernels.py"): {
        "selective_is_written_over": "test_what_is_kept_must_not_be_rotated_in_place",
    },
    (Kind.fails, "unit/training/model/test_kernels.py"): {
        "liger_needs_known_family": "test_liger_that_replaces_nothing_is_an_error",
    },
    (Kind.wrong, "unit/training/loop/test_interrupted_step.py"): {
        "stop_keeps_nothing": "test_a_stop_that_saves_nothing_leaves_what_was_saved_last",
    },
    (Kind.wrong, "equivalence/test_early_stop.py"): {
        "keep_best_is_a_metric": "test_a_metric_that_no_evaluation_has_is_never_the_best",
    },
    (Kind.wrong, RANK): {
        "one_process_without_strategy":
            "test_a_rank_that_is_alone_trains_on_its_share_of_the_planned_samples",
        "dp_splits_rows": "test_a_row_without_padding_is_one_row_that_cannot_be_split",
        "offload_on_cpu": "test_what_is_offloaded_from_a_cpu_goes_to_the_cpu",
        "adapters_on_random_weights": "test_random_weights_stay_random_under_adapters",
    },
    (Kind.fails, RANK): {
        "more_processes_than_devices": "test_a_process_without_a_gpu_of_its_own",
        "cpu_adam_needs_compiler": "test_deepspeeds_adam_is_compiled_and_needs_a_compiler",
    },
    (Kind.numbers, RANK): {
        "more_processes_than_cores": "test_processes_on_one_core_wait_for_each_other",
        "zero_of_one": "test_zero_of_one_keeps_a_copy_more",
        "adapter_rank_saves_nothing":
            "test_from_half_the_width_on_adapters_are_no_smaller_than_what_they_adapt",
        "four_bit_experts_are_kept": "test_dequantised_experts_are_kept_for_the_backward_pass",
    },
    (Kind.refusal, RANK): {
        "offload_needs_zero3": "test_deepspeed_offloads_no_weights_below_stage_3",
    },
    (Kind.wrong, f"{HERE}/test_peft_rules.py"): {
        "biases_of_four_bit_layers": "test_bitsandbytes_rounds_biases_in_the_forward_pass",
    },
    (Kind.numbers, "unit/workflows/test_fine_tuning.py"): dict.fromkeys(
        (
            "lr_far_off", "weight_decay_far_off", "max_grad_norm_far_off",
            "warmup_frac_far_off", "samples_per_step_far_off",
        ),
        "test_values_of_the_sources_are_not_warned_of",
    ),
    (Kind.wrong, "unit/launch/test_nodes.py"): {
        "nodes_without_strategy": "test_uneven_shares_start_other_processes_than_planned",
        "nodes_share_unevenly": "test_uneven_shares_start_other_processes_than_planned",
        "nodes_not_at_hand": "test_without_other_machines_all_processes_are_here",
    },
    (Kind.fails, "unit/training/loop/test_trainer_engine.py"): {
        "trainer_takes_plain_steps": "test_an_update_of_another_kind_is_refused",
    },
    (Kind.fails, "unit/results/trackers/test_online.py"): {
        "online_needs_key": "test_no_account",
    },
    (Kind.refusal, SERVICE): {
        "uri_is_no_folder": "test_mlflow_takes_no_folder_any_more",
        "uri_has_a_store": "test_mlflow_has_no_store_of_another_kind",
    },
    (Kind.fails, SERVICE): {
        "package_missing": "test_without_its_package_an_option_cannot_be_built",
    },
    (Kind.wrong, "unit/training/model/test_activation_offload.py"): {
        "fsdp_keeps_its_activations":
            "test_gathered_weights_are_moved_as_if_they_were_activations",
    },
    (Kind.wrong, ZERO): {
        "zero_needs_elementwise_optimizer": "test_adafactor_under_zero_is_another_algorithm",
        "zero_rounds_adapters": "test_adapters_of_narrow_weights_are_narrow_under_zero",
        "zero_keeps_masters": "test_zero_steps_on_copies_whatever_is_asked_for",
        "zero_with_compile": "test_zero_runs_the_model_uncompiled",
    },
    (Kind.numbers, "e2e/test_memory_ranks.py"): {
        "zero_knows_no_embeddings": "test_what_each_of_two_processes_takes_is_foreseen",
    },
    (Kind.wrong, "equivalence/test_in_backward.py"): {
        "in_backward_needs_other_optimizer":
            "test_steps_that_are_counted_by_group_would_be_counted_wrongly",
    },
    (Kind.wrong, FILES): {
        "nvme_holds_plain_state": "test_states_of_eight_bits_lose_their_scales",
    },
    (Kind.fails, FILES): {
        "nvme_weights_stay_in_memory": "test_weights_on_the_disk_fail_after_an_evaluation",
    },
    (Kind.numbers, FILES): {
        "nvme_has_space": "test_one_process_is_the_plain_loop",
        "nvme_folder_is_local": "test_one_process_is_the_plain_loop",
    },
    (Kind.fails, DISK): {
        "nvme_folder_writable": "test_below_a_file_there_is_no_folder",
        "nvme_needs_libaio": "test_deepspeed_compiles_against_libaio",
    },
    (Kind.numbers, DISK): {
        "nvme_folder_is_a_disk": "test_a_file_in_a_tmpfs_takes_memory",
    },
    (Kind.refusal, DISK): {
        "nvme_buffers_are_locked": "test_the_kernel_locks_no_more_than_the_limit",
    },
    (Kind.fails, "unit/training/distributed/test_sharding.py"): {
        "fsdp_needs_elementwise_optimizer": "test_what_the_rule_refuses_really_fails",
    },
}  # fmt: skip
"""Kind and file -> rule -> function."""

COMPARED = (
    "packing_needs_ragged", "grouping_needs_ragged", "multiple_needs_padding",
    "median_needs_lognormal", "min_len_needs_ragged", "tied_embeddings_need_head",
    "master_needs_narrow_weights", "casts_need_wide_weights", "tf32_needs_ampere",
    "paging_needs_cuda",
    "every_n_needs_checkpointing", "offload_needs_gpu", "empty_cache_needs_gpu",
    "backend_is_sdpas", "regional_needs_compiler", "fused_loss_needs_vocabulary",
    "sparse_prediction_needs_vocabulary",
    "dp_needs_two_gpus", "ddp_of_one", "fsdp_of_one", "p2p_needs_gpus",
    "ds_config_without_zero", "offload_needs_zero", "rslora_needs_rank",
    "implementation_is_adamws", "adapters_are_fused", "adapted_layers_have_biases",
    "extra_needs_trainer", "pinning_needs_cuda", "mode_is_wandbs",
    "entity_is_wandbs", "uri_is_mlflows", "norm_is_known_anyway", "early_stop_needs_evaluations",
    "keep_best_needs_evaluations", "shuffle_buffer_needs_stream",
)  # fmt: skip
"""Rules whose setting changes nothing in a run of two steps."""

NOWHERE = {
    "apex_needs_cuda": "apex is no package of the index, and is built for a GPU",
    "liger_needs_cuda": "liger-kernel needs triton, which is not installed for a CPU; by hand, "
    "with triton 3.9 and liger-kernel 0.8.5: `0 active drivers`",
    "dp_is_not_compiled": "needs two GPUs",
    "zero3_recomputes_frozen_weights": "one environment has one DeepSpeed; by hand, 0.19.2 fails "
    "with torch's CheckpointError, and 0.19.3, .4, .5, .7 and .8 give one and the same loss",
    "deepspeed_not_needed": "advice of the guide that it names; its speed needs GPUs",
}
"""Rule -> why no test shows what happens without it."""

REPLAYED = "PyTorch's own conditions; the failure itself: tests/gpu/test_gpu_refusals.py"
NOTES = {
    "liger_needs_known_family": "with a stand-in for liger-kernel, which needs triton",
    "graphs_take_one_micro_batch": REPLAYED,
    "graphs_take_the_whole_model": REPLAYED,
    "lr_far_off": "the published values; what another does to a model was not seen",
    "selective_is_written_over": "with a stand-in for Liger's kernel, which writes as it does",
}
"""Rule -> what its test leaves open."""

SHOWN: dict[str, Shown] = {
    **{rule: Shown(Kind.fails, BREAKING) for rule in FAILS},
    **{rule: Shown(Kind.same, SAME) for rule in COMPARED},
    **{
        rule: Shown(kind, f"{file}::{name}", NOTES.get(rule, ""))
        for (kind, file), names in TESTS.items()
        for rule, name in names.items()
    },
    **{rule: Shown(Kind.nowhere, "", reason) for rule, reason in NOWHERE.items()},
}
"""Every rule; docs/reference/rules.md says so of each."""
