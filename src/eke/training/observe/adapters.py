"""Which weights are trained: adapters, and what is frozen under them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from eke.training.distributed import deepspeed
from eke.training.distributed.deepspeed_update import DeepSpeedUpdate
from eke.training.distributed.sharding import part
from eke.training.loop.state import Job
from eke.training.model.adapter_files import is_adapted
from eke.training.model.four_bit import quant_states, quant_tensors
from eke.training.model.fp32_master_weights import stepped_weights


def note_adapters(job: Job) -> None:
    """What is trained and what is not, where that was asked for or happened all the same."""
    wanted = job.plan.config.peft.option
    found = adapters(job.bare_model)
    if wanted == "none" and not found:
        return
    job.effective["peft"] = found
    if _method(found) != wanted:
        job.warn(
            f"peft={wanted} did not take effect: the model has "
            f"{_method(found)}, with {found.get('adapted_modules', 0)} adapted modules"
        )
    held = _held(job)
    still = [name for name, p in _trained(job.bare_model) if id(p) not in held]
    if still:
        job.warn(f"peft={wanted}: the optimizer knows nothing of {len(still)} adapters: {still[0]}")


def adapters(model: nn.Module) -> dict[str, Any]:
    """Counts and bytes, read from the modules; empty for a model without adapters."""
    if not is_adapted(model):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    states = quant_states(model)
    trained = sum(_numbers(p) for _, p in _trained(model))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    # 4-bit weights lie in bytes; their states know how many numbers they are.
    numbers = trained + sum(_numbers(p) for p in frozen if p.is_floating_point())
    numbers += sum(state.shape.numel() for state in states)
    mine: Any = model
    return {
        "type": mine.peft_config["default"].peft_type.value.lower(),
        "adapted_modules": len(layers),
        "magnitude_vectors": sum(bool(getattr(m, "lora_magnitude_vector", ())) for m in layers),
        "trained_parameters": trained,
        "trained_frac": trained / max(1, numbers),
        "four_bit_tensors": len(states),
        "four_bit_type": ", ".join(sorted({state.quant_type for state in states})),
        "double_quantised": sum(bool(state.nested) for state in states),
        "frozen_weight_bytes": _bytes([*frozen, *quant_tensors(model)]),
    }


def _method(found: dict[str, Any]) -> str:
    """The option of the group `peft` that makes such a model."""
    if not found or not found["adapted_modules"]:
        return "none"
    if found["magnitude_vectors"]:
        return "dora"
    if found["type"] == "lora" and found["four_bit_tensors"]:
        return "qlora"
    return str(found["type"])


def _numbers(weight: nn.Parameter) -> int:
    """All of them, wherever they are: DeepSpeed's ZeRO-3 leaves empty weights behind."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def _bytes(tensors: list[Tensor]) -> int:
    """Of what this process holds."""
    held = [part(getattr(tensor, "ds_tensor", tensor)) for tensor in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _held(job: Job) -> set[int]:
    if isinstance(job.update, DeepSpeedUpdate):  # whose optimizer has flat pieces of them
        return {id(p) for p in deepspeed.stepped_weights(job.update.engine)}
    return {id(p) for p in stepped_weights(job.optimizer)}
