"""Models on disk in the Hub's layout, for transformers and for eke."""

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor, nn

from eke.common.errors import EkeError, RunError
from eke.common.text import format_number
from eke.config.schema import PretrainedModel
from eke.plan.planner import Plan
from eke.training.batches.tasks import chat_manifest, class_names, is_packed
from eke.training.custom import is_plain
from eke.training.custom.build import save_own_model
from eke.training.distributed.fsdp import local_tensor
from eke.training.distributed.parts import Parts
from eke.training.model.adapters import (
    ADAPTER_WEIGHTS,
    adapter_tensors,
    apply_peft,
    is_adapted,
    merge_adapters,
    read_tensors,
    save_adapter,
    warn_random_frozen_weights,
)
from eke.training.model.attention_kernels import repeat_heads, spare_mask_checks
from eke.training.model.build_model import build_model_and_report
from eke.training.model.checkpointing import apply_checkpointing
from eke.training.model.fused_adapters import fuse_adapters
from eke.training.model.load_pretrained import LoadReport
from eke.training.model.loss import apply_kernels, apply_loss
from eke.training.model.number_formats import kept_in_float32
from eke.training.state_parts import row_piece

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_pretrained(
    model: nn.Module,
    folder: Path,
    tokenizer: Any = None,
    shard_bytes: int = 50 * 10**9,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write configurations, weights and tokenizer files (if given) into `folder`.

    transformers loads a model with equal logits. Adapters are written in peft's layout instead of
    weights and config.json. `model` has no wrappers of torch.compile or DDP. If it holds only
    shards, `weights` are written instead. Raises OSError: The folder is incomplete.
    """
    from accelerate.utils import other
    from transformers import GenerationConfig

    mine: Any = model
    folder.mkdir(parents=True, exist_ok=True)
    # Published generation configs contradict themselves (Llama 2: a temperature without sampling),
    # and transformers rejects them: before 5.23 always, since then if they were changed. accelerate
    # 1.15 imports DeepSpeed only to check for its wrapper: 1.3 s and a line on standard output.
    as_it_is = patch.object(GenerationConfig, "validate", lambda *_, **__: None)
    quick = patch.object(other, "is_deepspeed_available", lambda: "deepspeed" in sys.modules)
    try:
        with as_it_is, quick:
            if is_plain(model):
                save_own_model(model, folder, with_weights=weights is None)
            elif is_adapted(model):
                save_adapter(model, folder, weights)
                if generation := getattr(mine.get_base_model(), "generation_config", None):
                    generation.save_pretrained(folder)  # ends of turn, which the base lacks
            else:
                mine.save_pretrained(folder, max_shard_size=shard_bytes, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for name in () if is_plain(model) else (CONFIG, GENERATION):
            _drop_training_settings(folder / name, _widest(model))
    except Exception as error:
        system = system_error(error)
        if system is None:
            raise
        raise OSError(system.errno, system.strerror, str(folder)) from error


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Load weights written by `save_pretrained`, sharded or not. RunError: They do not match."""
    places = adapter_tensors(model) if is_adapted(model) else model.state_dict()
    left = {_memory(tensor): name for name, tensor in places.items()}

    def put(name: str, tensor: Tensor) -> None:
        if name not in places:
            raise RunError(f"{folder}: {name} is not a tensor of {type(model).__name__}")
        place, mine = places[name], row_piece(places[name])
        if tensor.shape == place.shape:
            tensor = tensor.reshape(-1)[mine.first :][: mine.tensor.numel()].view_as(mine.tensor)
        if (tensor.shape, tensor.dtype) != (mine.tensor.shape, place.dtype):
            raise RunError(
                f"{folder}: {name} is {tensor.dtype} {list(tensor.shape)}, the model's is "
                f"{place.dtype} {list(place.shape)}"
            )
        mine.tensor.copy_(tensor)
        left.pop(_memory(place), None)  # one of its names is enough

    if not (is_plain(model) or is_adapted(model)) and _is_converted(model):
        _convert(model, folder, put)
    else:
        names = ADAPTER_WEIGHTS if is_adapted(model) else "model*.safetensors"
        for path in sorted(folder.glob(names)):
            for name, tensor in read_tensors(path):
                put(name, tensor)
    if left:
        raise RunError(
            f"{folder}: it lacks {format_number(len(left), 'tensor')}: {min(left.values())}"
        )


def system_error(error: BaseException) -> OSError | None:
    """Find the OSError that caused a library's error, if any."""
    # torch 2.13 raises a RuntimeError while handling it. safetensors 0.8 prints its number.
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__context__
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


def _is_converted(model: nn.Module) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    kept = getattr(model, "_weight_conversions", None)
    return bool(kept or get_model_conversion_mapping(model, add_legacy=False))


def _convert(model: Any, folder: Path, put: Callable[[str, Tensor], None]) -> None:
    """Pass saved tensors, or this rank's rows, to `put` under the model's names."""
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    def take(_: Any, name: str, tensor: Tensor, *__: Any) -> None:
        put(name, tensor)

    kept = getattr(model, "_weight_conversions", None)
    files: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("model*.safetensors"))]
    slices = {name: file.get_slice(name) for file in files for name in [*file.keys()]}
    config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    with patch.object(core_model_loading, "set_param_for_module", take):
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, slices, config)
    model._weight_conversions = kept
    for name in info.unexpected_keys:
        raise RunError(f"{folder}: {name} is not a tensor of {type(model).__name__}")


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return address and length of a tensor, equal for all names of a shared tensor."""
    return local_tensor(tensor).data_ptr(), tensor.numel()


def _widest(model: nn.Module) -> torch.dtype:
    """Return the widest format, except of weights that transformers keeps in float32."""
    narrow = min((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    kept = kept_in_float32(model, narrow)
    formats = [p.dtype for name, p in model.named_parameters() if not any(k in name for k in kept)]
    return max(formats, key=lambda dtype: dtype.itemsize, default=narrow)


def _drop_training_settings(path: Path, dtype: torch.dtype) -> None:
    """Drop `use_cache=false`, which is only right for training, and write the widest format."""
    if not path.is_file():
        return
    content = json.loads(path.read_text())
    after = {key: value for key, value in content.items() if (key, value) != ("use_cache", False)}
    # transformers 5.23 writes the format of the first tensor and would load all tensors in it.
    if "dtype" in content:
        after["dtype"] = str(dtype).removeprefix("torch.")
    if after != content:
        path.write_text(json.dumps(after, indent=2, sort_keys=True) + "\n")


def build_trainable(
    plan: Plan, device: torch.device, parts: Parts | None = None
) -> tuple[nn.Module, LoadReport]:
    """Build model, adapters, kernels, loss and checkpointing, in the required order."""
    model, report = build_model_and_report(plan, device, parts)
    with parts or nullcontext():
        model = apply_peft(plan, model, parts)
        fuse_adapters(plan, model)
        spare_mask_checks(model, packed=is_packed(plan.config))
        repeat_heads(plan)
        apply_kernels(plan, model)
        apply_loss(plan, model)
        apply_checkpointing(plan, model)
    return model, report


def save_merged_adapter(plan: Plan, adapter: Path, folder: Path) -> str:
    """Merge a saved adapter into the plan's base model on the host, write it, and return a warning.

    Raises RunError: The base model or trained weights are missing. OSError: The disk is full.
    """
    # The run's kernels may need its GPU.
    config = replace(plan.config, attention=replace(plan.config.attention, option="eager"))
    plan = replace(plan, config=config, compute=replace(plan.compute, float8="off"))
    base, report = build_model_and_report(plan, torch.device("cpu"))
    model = apply_peft(plan, base)
    if drawn := warn_random_frozen_weights(model, (*report.new_weights, *report.resized_weights)):
        raise RunError(f"{drawn[0]}. The run did not save them")
    load_weights(model, adapter)
    missing = ""
    try:
        set_id2label(plan, base, report)
        set_eos_token_ids(plan, base)
    except (EkeError, OSError) as error:
        what = "class names" if not plan.targets.per_token else "ends of turn"
        missing = f"the configuration lacks {what}: {error}"
    save_pretrained(merge_adapters(plan, model), folder)
    return missing


def set_eos_token_ids(plan: Plan, model: nn.Module) -> None:
    """Make generation also stop at the ends of turn that a base model was trained with."""
    chat, generation = chat_manifest(plan), getattr(model, "generation_config", None)
    if chat is None or generation is None:
        return
    known = generation.eos_token_id
    stops = [] if known is None else [known] if isinstance(known, int) else list(known)
    stops += [token for token in chat.ends_of_turn if token not in stops]
    generation.eos_token_id = stops[0] if len(stops) == 1 else stops or None


def set_id2label(plan: Plan, model: nn.Module, report: LoadReport) -> list[str]:
    """Write the data's class names into the configuration, and warn of a head with others."""
    names = class_names(plan)
    if not names or is_plain(model):
        return []
    config: Any = model.config
    before = config.id2label
    after = dict(enumerate(names))
    for number in range(len(names), plan.targets.num_labels):
        name = f"LABEL_{number}"
        after[number] = name if name not in names else f"CLASS_{number}"  # another class has it
    config.id2label = after
    config.label2id = {name: number for number, name in after.items()}
    trained = isinstance(plan.config.model, PretrainedModel) and not (
        report.new_weights or report.resized_weights
    )
    named = any(name != f"LABEL_{number}" for number, name in before.items())
    if not trained or not named or before == after:
        return []
    return [
        f"the checkpoint's head was trained on the classes {_listed(before)}, and is now "
        f"trained on {_listed(after)}"
    ]


def _listed(names: dict[int, str]) -> str:
    shown = [f"{number}={names[number]}" for number in sorted(names)[:5]]
    return " ".join(shown) + (" ..." if len(names) > len(shown) else "")
