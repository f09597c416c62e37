"""Models on the meta device with this rank's rows of each parameter.

Weights are drawn or read one tensor at a time, with the values of one process. Only this file uses
private names of torch 2.13 and transformers 5.23 for it (tests/equivalence/test_parts.py).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from eke.common.errors import RunError
from eke.training.distributed.fsdp import full_tensor
from eke.training.model.checkpointing import find_layers

_FILLS = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "zero_", "fill_", "copy_"}
"""Operations that overwrite an entire tensor."""


def rows(num_rows: int, rank: int, world: int) -> slice:
    """Return a rank's rows of a tensor as in torch's `Shard(0)`: the last are short or empty."""
    size = -(-num_rows // world)
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


class Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """This rank's rows of parameters on the meta device. All ranks must do the same.

    Inside its context, operations on a parameter (drawing, rounding, copying) also change its rows,
    along the dimension "shard" of the mesh.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self.mesh, self.shard = mesh, mesh["shard"]
        self._filling: tuple[Any, Tensor] | None = None
        """Storage that was overwritten last, and its full tensor, for operations on views of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        first: Any = args[0] if args else None
        storage = _storage(first)
        if storage is None:
            found = func(*args, **kwargs)
            if name == "_to_copy" and found.is_meta and not first.is_meta:
                self._begin(found, first.to(found.dtype, copy=True))
            return found
        # transformers pads a tied output bias, by 0 if it is as long as the table.
        padded = name == "constant_pad_nd" and not any(args[1])
        if padded or name in ("_to_copy", "clone"):
            return self._copy(first, **kwargs)
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        if self._filling is None or self._filling[0] is not storage:
            if name not in _FILLS or not _is_entire_storage(first):
                raise RuntimeError(f"{name} changes a tensor in part that was cut already")
            self._begin(first, storage.part.new_empty(first.shape))
        func(self._real(first), *args[1:], **kwargs)
        return first

    def _copy(self, source: Tensor, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        """Copy the rows. The copy stays on the meta device, wherever its rows are moved."""
        part, found = self.part(source), torch.empty_like(source, dtype=dtype)
        to = part.device if device is None or device.type == "meta" else device
        _keep(found, part.to(to, found.dtype, copy=True))
        return found

    def _begin(self, meta: Tensor, whole: Tensor) -> None:
        """Replace the rows of a tensor by the full tensor, until another tensor begins."""
        self._cut()
        self._filling = _keep(meta, whole.new_empty(0)), whole

    def _real(self, view: Tensor) -> Tensor:
        assert self._filling is not None, "_begin was called"
        return self._filling[1].as_strided(view.shape, view.stride(), view.storage_offset())

    def _cut(self) -> None:
        """Keep only the rows of the tensor filled last."""
        if self._filling is not None:
            (storage, whole), self._filling = self._filling, None
            storage.part = self._rows(whole)

    def _rows(self, whole: Tensor) -> Tensor:
        place = self.shard.get_local_rank(), self.shard.size()
        return (whole[rows(len(whole), *place)] if whole.dim() else whole).clone()

    def part(self, parameter: Tensor) -> Tensor:
        """Return this rank's rows of a parameter, or a scalar parameter."""
        self._cut()
        storage = _storage(parameter)
        if storage is None and not parameter.is_meta:
            return self._rows(parameter.detach())
        if storage is None or not _is_entire_storage(parameter):
            raise RuntimeError(f"a parameter of shape {[*parameter.shape]} was built without rows")
        return cast(Tensor, storage.part)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Shard each parameter of a random model when the next one is drawn, as in one process."""
        register, truncated = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_

        def cut(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            known = parameter is None or parameter.is_meta
            register(module, name, parameter if known else self._moved(cast(Any, parameter)))

        def fill(tensor: Tensor, *how: Any, **more: Any) -> Tensor:
            if _storage(tensor) is None:
                return truncated(tensor, *how, **more)
            tensor.detach().zero_()  # makes the full tensor, required by the function
            truncated(self._real(tensor), *how, **more)
            return tensor

        init = patch.object(nn.init, "_no_grad_trunc_normal_", fill)
        with self, patch.object(nn.Module, "register_parameter", cut), init:
            yield

    def _moved(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter without data, after keeping its rows."""
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        data: Any = parameter.detach()
        if hasattr(data, "to_local"):  # a DTensor
            _keep(empty, data.to_local())
        else:
            self._begin(empty, data.as_subclass(Tensor).contiguous())
        return nn.Parameter(empty, parameter.requires_grad)

    def adopt(self, model: nn.Module) -> None:
        """Keep the rows of all parameters that have data, sharded or not, in place."""
        _replace([p for p in _uses(model.modules()) if not p[2].is_meta], self._moved)
        self._cut()

    def gathered(self, parameter: Tensor) -> Tensor:
        """Return the full parameter on this rank's device. Collective."""
        return full_tensor(_placed(self.part(parameter), parameter, self.shard).detach())

    @contextmanager
    def whole(self, modules: Iterable[nn.Module], make: Any = None) -> Iterator[None]:
        """Give the modules' own parameters all their data inside the block. Collective."""
        places = [place for place in _uses(modules) if place[2].is_meta]
        made = _replace(places, make or (lambda p: nn.Parameter(self.gathered(p), p.requires_grad)))
        try:
            yield
        finally:
            for owner, name, old in places:
                if owner.get(name) is made[old]:  # otherwise it was quantised
                    owner[name] = old
                    old.requires_grad_(old.requires_grad if make else made[old].requires_grad)

    @contextmanager
    def computing(self, model: nn.Module) -> Iterator[None]:
        """Let `model` compute on all ranks without backward, with one layer's weights at a time."""
        layers = find_layers(model)
        inner = {m for layer in layers for m in layer.modules()}
        forget: Any = lambda _: None  # noqa: E731  # only used here
        drop = saved_tensors_hooks(forget, forget)

        make = partial(cast(Any, _Gathered).apply, self)

        def with_weights(layer: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
            with self.whole(layer.modules(), make):
                return plain(*args, **kwargs)

        with ExitStack() as stack, drop, self.whole(m for m in model.modules() if m not in inner):
            for layer in layers:
                forward = partial(with_weights, layer, layer.forward)
                stack.enter_context(patch.object(layer, "forward", forward))
            yield

    def put(self, model: nn.Module, cut: Callable[[], None]) -> None:
        """Let `cut` apply FSDP2 to the model, and load the rows into it, on this rank's device."""
        # FSDP2 reads replaced parameters at its first forward pass (torch 2.13). `to_empty` would
        # untie them, and hold each shard twice.
        held = [(owner, name, self.part(p)) for owner, name, p in _uses(model.modules())]
        cut()
        of = {owner[name]: part.to(self.shard.device_type) for owner, name, part in held}
        _replace(_uses(model.modules()), lambda p: _placed(of[p], p))

    def sharded_flat(self, init: Any) -> AbstractContextManager[Any]:
        """Return a context in which `zero.Init` shards full parameters, with their identity."""
        plain, swap = init._convert_to_zero_parameters, cast(Any, torch.utils.swap_tensors)

        def convert(zero: Any, parameters: Iterable[nn.Parameter]) -> None:
            for old in parameters:
                swap(old, nn.Parameter(self.gathered(old), old.requires_grad))
                plain(zero, [old])

        return patch.object(init, "_convert_to_zero_parameters", convert)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Make `from_pretrained` read only rows, if possible. RunError: Ranks have other files."""
        from transformers import PreTrainedModel, modeling_utils

        # Transformers 5.23 reads slices for DTensors, but compares sizes of shards, and draws
        # DTensors. Tensors that may differ in size, are drawn or are converted across rows are read
        # in full.
        plain: Any = PreTrainedModel._load_pretrained_model

        def cut_and_read(model: Any, state: Any, files: Any, config: Any, *more: Any) -> Any:
            sizes, mapping = _sizes(files), config.weight_mapping or []
            for name in sorted(_cuttable(model, sizes, mapping, self.shard.size())):
                module, _, leaf = name.rpartition(".")
                owner = model.get_submodule(module)._parameters
                owner[leaf] = _placed(self._rows(owner[leaf]), owner[leaf], self.shard)
            return plain(model, state, files, config, *more)

        # The second patch prevents an allocation of the full model on a GPU, freed immediately.
        read = patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(cut_and_read))
        with read, patch.object(modeling_utils, "caching_allocator_warmup", lambda *_: None):
            yield


def _storage(tensor: Any) -> Any:
    """Return the storage of a meta tensor that holds rows in `part`, None if there are none."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_meta:
        return None
    # torch keeps attributes of a storage while a tensor uses it, also after `x.data = ...`.
    storage = tensor.untyped_storage()
    return storage if hasattr(storage, "part") else None


def _keep(meta: Tensor, part: Tensor) -> Any:
    storage: Any = meta.untyped_storage()
    storage.part = part
    return storage


def _is_entire_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is its entire storage in order, not a view of a part."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _uses(modules: Iterable[nn.Module]) -> list[Any]:
    """Return owner, name and parameter of each occurrence. A tied parameter has several."""
    every = ((module._parameters, name) for module in modules for name in module._parameters)
    return [(owner, name, owner[name]) for owner, name in every if owner[name] is not None]


def _replace(places: list[Any], make: Callable[[Any], Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for owner, name, old in places:
        made[old] = owner[name] = made[old] if old in made else make(old)
    return made


def _placed(part: Tensor, like: Any, mesh: Any = None) -> nn.Parameter:
    """Return a parameter shaped like `like`, of which this rank has `part`, sharded likewise."""
    from torch.distributed.tensor import DTensor, Shard

    if not like.dim():
        return nn.Parameter(part, like.requires_grad)
    mesh, cut = getattr(like, "device_mesh", mesh), getattr(like, "placements", [Shard(0)])
    stride = torch.empty(like.shape, device="meta").stride()
    local: Any = DTensor.from_local  # torch 2.13: not annotated
    made = local(part, mesh, cut, run_check=False, shape=like.shape, stride=stride)
    return nn.Parameter(made, like.requires_grad)


class _Gathered(torch.autograd.Function):
    """Full tensor of a parameter, which stays the leaf of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, parameter: Tensor) -> Tensor:
        return parts.gathered(parameter)


def _sizes(files: Sequence[str]) -> dict[str, list[int]]:
    """Return the sizes of the files' tensors from the headers, which all ranks compare."""
    found: dict[str, tuple[list[int], str]] = {}
    error = None
    try:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # safetensors 0.8: not iterable itself
                    tensor = file.get_slice(name)
                    found[name] = tensor.get_shape(), tensor.get_dtype()
    except (OSError, SafetensorError) as raised:
        error = raised
    every: list[Any] = [None] * dist.get_world_size()
    mine = hashlib.sha256(repr((sorted(found.items()), error)).encode()).hexdigest()
    dist.all_gather_object(every, mine)
    if error is not None:
        raise error
    if others := [rank for rank, theirs in enumerate(every) if theirs != mine]:
        why = f"its files are not those of ranks {others}, by their headers"
        raise RunError(f"{why} -> the same files on every machine")
    return {name: size for name, (size, _) in found.items()}


def _cuttable(model: Any, sizes: dict[str, list[int]], mapping: Any, world: int) -> set[str]:
    """Return parameters whose rows can be read: of equal size in the files, or stacked."""
    from transformers import core_model_loading as loading

    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    of = {pattern: c for c in converters for pattern in c.source_patterns}
    places, prefix, found = model.state_dict(), model.base_model_prefix, set()
    for name, there in sizes.items():
        key, pattern = loading.rename_source_key(name, renamings, converters, prefix, places)
        here = [*places[key].shape] if key in places else []
        if here and (_stacks(of[pattern], here, world) if pattern else here == there):
            found.add(key)
    return found & {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _stacks(converter: Any, size: Sequence[int], world: int) -> bool:
    """Return whether a conversion stacks tensors, some per rank, without changes across rows."""
    kinds = [(type(o).__name__, getattr(o, "dim", 0) > 0) for o in converter.operations]
    stacks = kinds[0] == ("MergeModulelist", False) and {*kinds[1:]} <= {("Concatenate", True)}
    return stacks and rows(size[0], world - 1, world).start < size[0]
