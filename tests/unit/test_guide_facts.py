"""Claims of notes/claims.md that arithmetic or an installed library answers."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch
from reference.published import ROWS
from support import TINY

from eke.hardware import DEVICES

ROW = {row.technique: row for row in ROWS}


@pytest.fixture(scope="module")
def arguments():
    """Name of each of Trainer's arguments -> its default."""
    from transformers import TrainingArguments

    return {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


def test_guide_labels_are_all_zero() -> None:
    assert set(np.random.default_rng(0).integers(0, 1, 512)) == {0}
    assert set(np.random.RandomState(0).randint(0, 1, 512)) == {0}


def test_eke_labels_have_both_classes(tmp_path) -> None:
    from eke.config.compose import compose
    from eke.training.batches.dataset import build_data
    from eke.workflows.planning import plan_for

    overrides = ("experiment=guide_single_gpu", "hardware=cpu", *TINY, f"paths.runs={tmp_path}")
    data = build_data(plan_for(compose(overrides), planning=True))
    assert {int(data.train[0, n]["labels"]) for n in range(64)} == {0, 1}


def test_largest_numbers_of_formats() -> None:
    assert torch.finfo(torch.float16).max == 65504
    assert torch.finfo(torch.bfloat16).max == pytest.approx(3.39e38, rel=1e-3)
    assert torch.finfo(torch.float32).max == pytest.approx(3.40e38, rel=1e-3)
    assert torch.finfo(torch.bfloat16).eps > torch.finfo(torch.float16).eps


def test_bits_of_the_formats() -> None:
    """tf32 is 1 + 8 + 10 bits; float16 has the same ten, float32 the same eight."""
    sign, exponent, mantissa = 1, 8, 10
    assert sign + exponent + mantissa == 19
    assert torch.finfo(torch.float16).eps == 2**-10
    assert torch.finfo(torch.float32).eps == 2**-23


def test_tf32_is_off_for_products() -> None:
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_tf32_is_not_a_tensor_format() -> None:
    assert not hasattr(torch, "tf32")
    assert not hasattr(torch, "tfloat32")


def test_sixteen_is_the_ratio_of_an_a100s_peaks() -> None:
    peaks = dict(DEVICES["a100_40"].peak_flops)
    assert peaks["bfloat16"] / peaks["float32"] == 16
    assert peaks["tf32"] / peaks["float32"] == 8


def test_guide_rows_show_29_percent_for_checkpointing() -> None:
    without, with_it = ROW["gradient accumulation"], ROW["accumulation, checkpointing"]
    assert without.samples_per_s / with_it.samples_per_s == pytest.approx(1.29, abs=0.005)


def test_guide_rows_show_more_than_twice_for_fp16() -> None:
    assert ROW["fp16"].samples_per_s / ROW["none"].samples_per_s == pytest.approx(2.1, abs=0.01)


def test_percentages_of_the_nvlink_table() -> None:
    """110 s of DP, 101 s of DDP with NVLink and 131 s without."""
    data_parallel, with_nvlink, without = 110, 101, 131
    assert 1 - with_nvlink / without == pytest.approx(0.23, abs=0.005)
    assert data_parallel / with_nvlink - 1 == pytest.approx(0.09, abs=0.005)
    assert 1 - data_parallel / without == pytest.approx(0.16, abs=0.005)


def test_sums_of_the_guides() -> None:
    copy, momentum, variance = 4, 4, 4
    bytes_each = copy + momentum + variance
    assert bytes_each * 7 == 84
    assert bytes_each * 0.2 == pytest.approx(2.4)
    a_link = 14.0625
    assert 4 * a_link == 56.25
    assert 2 * 4 * a_link == 112.5


def test_trainers_defaults(arguments) -> None:
    assert arguments["dataloader_pin_memory"] is True
    assert arguments["dataloader_num_workers"] == 0
    assert arguments["optim"] == "adamw_torch_fused"


def test_removed_arguments(arguments) -> None:
    from accelerate import Accelerator

    assert "evaluation_strategy" not in arguments
    assert "eval_strategy" in arguments
    assert "fp16" not in inspect.signature(Accelerator).parameters
    assert "mixed_precision" in inspect.signature(Accelerator).parameters


def test_arguments_that_never_existed(arguments) -> None:
    assert not {"offload_optimizer", "offload_param"} & set(arguments)


def test_arguments_that_still_exist(arguments) -> None:
    assert {"fp16_full_eval", "bf16_full_eval", "deepspeed"} <= set(arguments)


def test_removed_optimizers() -> None:
    from transformers.training_args import OptimizerNames

    names = {each.value for each in OptimizerNames}
    assert not {"adamw_hf", "adamw_apex_fused"} & names
    assert {"adamw_torch", "adamw_anyprecision", "adafactor", "adamw_bnb_8bit"} <= names


def test_removed_functions() -> None:
    import transformers.utils

    assert not hasattr(transformers.utils, "is_torch_bf16_available")
    assert not hasattr(torch.optim, "_multi_tensor")
    assert "foreach" in inspect.signature(torch.optim.AdamW).parameters


def test_removed_backends() -> None:
    names = set(torch.compiler.list_backends(exclude_tags=None))
    gone = {"nvfuser", "aot_nvfuser", "aot_cudagraphs", "ofi", "fx2trt", "onnxrt", "ipex"}
    assert not gone & names
    assert {"eager", "aot_eager", "inductor", "cudagraphs"} <= names


def test_launch_module_is_deprecated() -> None:
    import torch.distributed.launch

    assert "deprecated" in (torch.distributed.launch.__doc__ or "") + (
        torch.distributed.launch.main.__doc__ or ""
    ) + inspect.getsource(torch.distributed.launch)
