"""nn.DataParallel: one process, several GPUs; the loss is computed where the logits are.

PyTorch runs a copy of the module on each device, in threads that inherit neither autocast's format
nor what watches this thread; and gathers what they return on the first device. So the copies enter
autocast themselves, and what is gathered is one number per device and not their logits.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

import torch
from torch import Tensor, nn

from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.model.loss import LossFunction
from eke.training.model.precision import Formats


class LossOnDevice(nn.Module):
    """A model and its loss as one module, so that only the loss leaves a device."""

    def __init__(self, model: nn.Module, loss: LossFunction, formats: Formats) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.formats = formats
        self.devices: set[str] = set()
        """Where forward passes ran; the copies share this set."""

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        """The loss summed over this device's rows, shape (1,)."""
        self.devices.add(str(labels.device))
        with self.formats.autocast():
            # The counts are those of all rows, and the caller has them.
            return self.loss(self.model, MicroBatch(inputs, labels, 0, 0, 0)).reshape(1)


def build_data_parallel(
    plan: Plan, model: nn.Module, loss: LossFunction, formats: Formats
) -> tuple[nn.Module, LossFunction]:
    """The module that feeds all devices, and how to get the loss of a micro-batch out of it.

    Args:
        plan: says how many devices.
        model: on the first of them.
        loss: of one device's rows.
        formats: of the forward pass.
    """
    module = LossOnDevice(model, loss, formats)
    devices = list(range(plan.batch.devices)) if torch.cuda.is_available() else None
    parallel = nn.DataParallel(module, device_ids=devices)

    def summed(called: nn.Module, batch: MicroBatch) -> Tensor:
        total: Tensor = called(batch.labels, **batch.inputs).sum()
        return total

    return parallel, summed
