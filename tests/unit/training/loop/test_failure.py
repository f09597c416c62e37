"""What an exception that ended a run means."""

import errno

import pytest
import torch
import torch.distributed as dist
from unit.training.model.plans import hand_plan

from eke.common.errors import ConfigError, Problem
from eke.plan.record import Outcome
from eke.training.loop.failure import Diverged, classify, is_out_of_memory
from eke.training.loop.stop import Stopped


def cpu_allocator_error() -> RuntimeError:
    """torch's own: a petabyte is more than an address space holds."""
    try:
        torch.empty(2**50, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("a petabyte was allocated")


def no_memory() -> MemoryError:
    try:
        bytearray(2**62)
    except MemoryError as error:
        return error
    raise AssertionError("four exabytes were allocated")


OUT_OF_MEMORY = {
    "cpu allocator": cpu_allocator_error(),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "python": no_memory(),
    "system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "driver": RuntimeError("CUDA driver error: out of memory"),
    "c++": RuntimeError("std::bad_alloc"),
    "loader's shared memory": RuntimeError("unable to mmap 1024 bytes from file </torch_1>: ..."),
    "cublas": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cusolver": RuntimeError(
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"
    ),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "nccl": dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for "
        "details)\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'"
    ),
}


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_out_of_memory_failure_has_its_phase(error) -> None:
    outcome, failure = classify(error, "backward")
    assert outcome is Outcome.oom
    assert failure.phase == "backward"
    assert failure.message.startswith("out of memory in backward: ")
    assert "\n" not in failure.message
    assert type(error).__name__ in failure.traceback


OTHERS = {
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)"),
    "a word in a file name": FileNotFoundError(errno.ENOENT, "No such file", "out of memory.txt"),
    "value": ValueError("out of memory is only a word here"),
    "type": TypeError("cannot allocate memory of this type"),
    "key": KeyError("loss"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
}


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS.keys())
def test_other_errors_are_crashes(error) -> None:
    assert not is_out_of_memory(error)
    outcome, failure = classify(error, "forward")
    assert outcome is Outcome.crashed
    assert failure.message.startswith(f"{type(error).__name__}: ")


def test_empty_error_message_uses_the_class_name() -> None:
    _, failure = classify(RuntimeError("\n  first\nsecond"), "forward")
    assert failure.message == "RuntimeError: first"
    assert "second" in failure.traceback
    for error in (KeyboardInterrupt(), AssertionError()):
        assert classify(error, "data")[1].message == type(error).__name__


@pytest.mark.parametrize(
    ("number", "limit", "why"),
    [
        pytest.param(errno.ENOSPC, -1, "The disk is full", id="disk"),
        pytest.param(errno.ENOSPC, 4096, "The disk is full", id="disk and a limit"),
        pytest.param(errno.EDQUOT, -1, "The disk quota is used up", id="quota"),
        pytest.param(errno.EFBIG, 2048 * 1024, "limited to 2048 KiB: ulimit -f", id="ulimit"),
        pytest.param(errno.EFBIG, -1, "The file system has a size limit", id="file system"),
    ],
)
def test_file_size_error_has_its_reason(number, limit, why, monkeypatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    outcome, failure = classify(OSError(number, "words", "/a/file"), "checkpoint")
    assert outcome is Outcome.crashed, "the same command may go on, once there is room"
    assert failure.message.startswith("/a/file: words. ")
    assert why in failure.message
    assert ("disk is full" in failure.message) is (number == errno.ENOSPC)


STOPS = (Outcome.cancelled, Outcome.preempted, Outcome.timeout)
ENDS = [(Stopped(outcome, "SIGTERM after step 3"), outcome) for outcome in STOPS]
ENDS += [(Diverged("the loss is nan at step 7"), Outcome.diverged)]


@pytest.mark.parametrize(("error", "outcome"), ENDS, ids=[end.value for _, end in ENDS])
def test_orderly_stop_is_not_a_crash(error, outcome) -> None:
    found, failure = classify(error, "optimizer")
    assert found is outcome
    assert (failure.message, failure.traceback) == (str(error), "")


def test_missing_torch_attribute_names_the_tested_release() -> None:
    with pytest.raises(AttributeError) as caught:
        torch._C._never_there  # noqa: B018  # raises
    outcome, failure = classify(caught.value, "forward")
    assert outcome is Outcome.crashed
    assert "_never_there" in failure.message
    assert "Traceback" in failure.traceback


def test_compiler_failure_names_the_cache_folder(monkeypatch) -> None:
    """A file that was left empty there has been seen to end every later run."""
    from torch._inductor.exc import InductorError  # seconds, and no other test needs it

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept/here")
    error = InductorError(AttributeError("module 'x' has no attribute 'y'"), None)
    outcome, failure = classify(error, "forward")
    assert outcome is Outcome.crashed
    assert failure.message.startswith("InductorError: AttributeError: ")
    assert "/kept/here" in failure.message
    assert "TORCHINDUCTOR_CACHE_DIR=" in failure.message
    _, other = classify(AttributeError("another"), "forward")
    assert "TORCHINDUCTOR" not in other.message


def raised(*modules: str) -> Exception:
    """An error of a call chain through these modules, the innermost last."""
    call = None
    for module in reversed(modules):
        own = {"__name__": module, "inner": call}
        exec("def call(): inner()" if call else "def call(): int('no number')", own)
        call = own["call"]
    try:
        call()
    except ValueError as error:
        return error
    raise AssertionError("nothing was raised")


CHAINS = {
    "a library": (("eke.loop", "peft.tuners", "torch.nn"), True),
    "its Python": (("eke.loop", "peft.tuners", "json"), True),
    "eke": (("eke.loop", "eke.model"), False),
    "Python, for eke": (("eke.loop", "json.decoder"), False),
    "eke's hook": (("eke.loop", "torch.nn", "eke.model"), False),
    "a file": (("eke.training.checkpoint", "torch.serialization"), False),
    "no eke": (("torch.nn",), False),
}


@pytest.mark.parametrize(("modules", "refused"), CHAINS.values(), ids=CHAINS)
def test_library_error_before_the_first_step_is_a_rejection(modules, refused) -> None:
    error, plan = raised(*modules), hand_plan("model=tiny", "peft=lora")
    outcome, failure = classify(error, "build", plan)
    assert outcome is (Outcome.refused if refused else Outcome.crashed)
    assert "Traceback" in failure.traceback
    assert "\n" not in failure.message
    assert classify(error, "forward")[0] is Outcome.crashed


@pytest.mark.parametrize(
    ("modules", "fix"),
    [
        (("eke.loop", "peft.tuners", "torch.nn"), "-> peft=none"),
        (("eke.loop", "torch.utils.checkpoint", "transformers.llama", "torch.nn"), ""),
        (("eke.loop", "torch.utils.checkpoint", "transformers.llama", "torch.utils.checkpoint"),
         "-> memory=none"),
        (("eke.loop", "bitsandbytes.nn"), "-> peft=none"),
    ],
    ids=["peft", "the model", "memory", "bitsandbytes"],
)  # fmt: skip
def test_override_is_proposed_only_if_it_avoids_the_error(modules, fix) -> None:
    plan = hand_plan("model=tiny", "peft=lora", "memory=checkpointing")
    message = classify(raised(*modules), "forward", plan)[1].message
    assert message.partition("-> ")[2] == fix.partition("-> ")[2]
    assert "memory=checkpointing peft=lora: " in message


def test_invalid_setting_found_by_the_worker_is_rejected() -> None:
    outcome, failure = classify(ConfigError(Problem("peft", "lora", "cannot be")), "build")
    assert (outcome, failure.message) == (Outcome.refused, "peft = lora cannot be")
