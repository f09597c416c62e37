"""What a trace answers where a program looks at data, which fake tensors have not."""

from typing import Any

import torch

aten: Any = torch.ops.aten

_ROW_BYTES = 16
"""Rows of a grouped product begin at multiples of this many bytes."""

_ITEM = aten._local_scalar_dense.default


class Questions:
    """Answers of a batch whose rows are alike.

    Args:
        padded: some row of the batch is padded, so that its mask is not all ones.
        make_empty: shape, dtype and device -> a fake tensor.
    """

    def __init__(self, padded: bool, make_empty: Any) -> None:
        self.padded = padded
        self._make_empty = make_empty

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, or NotImplemented for all that can be told from shapes."""
        if func is _ITEM:
            return self._item(args[0])
        if func is aten.unique_consecutive.default:
            # T5's classifier asks whether all rows have as many ends of text: they have.
            device = args[0].device
            return tuple(self._make_empty((n,), torch.int64, device) for n in (1, 0, 0))
        if func is aten.index.Tensor and _picks_by_truth(args[1]):
            return self._one_of_each_row(args[0])
        if func is aten._grouped_mm.default:
            offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
            return self._grouped(args[0], args[1], offsets)
        return NotImplemented

    def _grouped(self, one: Any, other: Any, offsets: Any) -> Any:
        """Products of groups of rows: fake ones are refused in float32, which PyTorch computes.

        Shapes and strides: torch/_meta_registrations.py, _create_grouped_mm_output_tensor.
        """
        if one.dim() == 2 and other.dim() == 2:
            shape: tuple[int, ...] = (offsets.shape[0], one.shape[0], other.shape[1])
        elif one.dim() == 2:
            shape = (one.shape[0], other.shape[-1])
        elif other.dim() == 2:
            shape = (one.shape[1], other.shape[1])
        else:
            shape = (*one.shape[:2], other.shape[-1])
        width = -(-shape[-1] * one.itemsize // _ROW_BYTES) * _ROW_BYTES // one.itemsize
        whole = self._make_empty((*shape[:-1], width), one.dtype, one.device)
        return whole[..., : shape[-1]] if width != shape[-1] else whole

    def _item(self, tensor: Any) -> bool | int | float:
        if tensor.dtype == torch.bool:
            return not self.padded
        return 1.0 if tensor.is_floating_point() else 1

    def _one_of_each_row(self, source: Any) -> Any:
        """T5's classifier takes each row's end of text: (rows, length, width) -> (rows, width)."""
        shape = (source.shape[0], *source.shape[2:])
        return self._make_empty(shape, source.dtype, source.device)


def _picks_by_truth(indices: Any) -> bool:
    only = len(indices) == 1 and indices[0] is not None
    return bool(only and indices[0].dtype == torch.bool and indices[0].dim() == 2)
