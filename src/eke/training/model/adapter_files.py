"""Adapters on disk in peft's layout: what `peft.PeftModel.from_pretrained(base, folder)` loads.

peft is imported inside the functions: naming a builder must not cost its import.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapted(model: nn.Module) -> bool:
    """Whether the model is peft's; does not import peft for one that is not."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_tensors(
    model: nn.Module, weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The trained tensors under the names they have in the file: the model's own, not copies.

    Args:
        model: of peft.
        weights: the trained tensors under the model's names, where it holds only parts of them.
    """
    from peft import get_peft_model_state_dict

    # Without a look at the hub for the base model's vocabulary, which is unchanged.
    tensors: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=weights, save_embedding_layers=False
    )
    return tensors


def save_adapter(model: nn.Module, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the trained tensors and peft's configuration; no model card, which would be empty.

    Args:
        model: of peft.
        folder: is there.
        weights: instead of the model's own, where it holds only parts of them.
    """
    mine: Any = model
    config = copy.copy(mine.peft_config["default"])
    config.inference_mode = True
    if isinstance(config.target_modules, set):  # in another order in every process
        config.target_modules = sorted(config.target_modules)
    tensors = {n: t.detach().contiguous() for n, t in adapter_tensors(model, weights).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # safetensors 0.8: not iterable itself
            yield name, file.get_tensor(name)
