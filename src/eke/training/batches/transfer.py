"""Micro-batches on their way to the device."""

import torch

from eke.training.batches.batches import MicroBatch


class Transfer:
    """Copies micro-batches to a device; to a GPU in a stream of its own.

    The host is ahead of a GPU. In the stream that computes, a copy would be done after everything
    that is queued there, and from memory that is not page-locked the host would wait for that. In a
    stream of its own it is there before its step begins (CUDA C++ Programming Guide, "Overlap of
    Data Transfer and Kernel Execution").
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch 2.13

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch on the device, for what is queued after this in the current stream."""
        if self.device.type == "cpu":
            return batch  # made there
        if self.stream is None:
            return batch.to(self.device)
        with torch.cuda.stream(self.stream):
            moved = batch.to(self.device)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self.stream)
        for tensor in moved.tensors:
            # Its memory is the other stream's, which must not use it again before this one has.
            tensor.record_stream(computing)
        return moved
