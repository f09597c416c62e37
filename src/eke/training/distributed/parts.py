"""Parts from the start: a model on the meta device, and this rank's rows of each of its parameters.

Weights are drawn or read one tensor at a time, with the numbers of one process, and cut: a rank
holds its rows and the largest tensor. While `Parts` is entered, what building does to a parameter
(drawing, rounding, copying) is done to its rows, too.

The private names of torch 2.13 and transformers 5.23 that this relies on are in this file alone;
tests/equivalence/test_parts.py tells of versions without them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from eke.common.errors import RunError
from eke.training.model.checkpointing import find_layers

_FILLS = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "zero_", "fill_", "copy_"}
"""Operations that set a whole tensor, whatever was in it."""

META = torch.device("meta")


def rows(num_rows: int, rank: int, world: int) -> slice:
    """A rank's rows of a tensor, as torch's `Shard(0)` has them: the last are short or empty."""
    size = -(-num_rows // world)
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


class Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """This rank's rows of parameters on the meta device; all ranks of `mesh` do the same with it.

    Args:
        mesh: with a dimension "shard", along which rows are cut.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self.mesh = mesh["shard"]
        self._held: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        """Rows by address of the meta tensor's storage, which `parameter.data = ...` takes along;
        an address is not used again while there is a weak reference to it."""
        self._whole: tuple[int, Tensor] | None = None
        """The tensor that is being filled: operations on views of it follow at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], Tensor) else None
        key = None if first is None else self._key(first)
        # Transformers pads a tied output bias, by nothing where it has the table's length already.
        padded = name == "constant_pad_nd" and key is not None and not any(args[1])
        if first is not None and (padded or name in ("_to_copy", "clone")):
            return self._copy(func, first, key, args[1:], kwargs)
        if key is None or not func._schema.is_mutable:
            return func(*args, **kwargs)
        assert first is not None, "it has a key"
        covers = first.nbytes == first.untyped_storage().nbytes()
        if self._whole is None or self._whole[0] != key:
            part = self._held[key][1]
            if covers and name not in _FILLS and not any(isinstance(a, Tensor) for a in args[1:]):
                func(part, *args[1:], **kwargs)
                return first
            if not covers or name not in _FILLS:
                raise RuntimeError(f"{name}: a part of a tensor is changed that was cut already")
            self._fill(key, first)
        func(self._real(first), *args[1:], **kwargs)
        return first

    def _copy(self, func: Any, source: Tensor, key: int | None, args: Any, kwargs: Any) -> Tensor:
        """A copy of another format or device; one that goes to the meta device keeps its rows."""
        device = kwargs.get("device") or source.device
        if key is None:
            found = cast(Tensor, func(source, *args, **kwargs))
            if device.type == "meta" and not source.is_meta:
                self.hold(found, func(source, *args, **{**kwargs, "device": source.device}))
            return found
        stay = {"device": META} if "device" in kwargs else {}
        found = func(source, *args, **{**kwargs, **stay})
        part = self.part(source)
        move = {"device": part.device if device.type == "meta" else device} if stay else {}
        self._keep(found, func(part, *args, **{**kwargs, **move}))
        self._held = {k: held for k, held in self._held.items() if not held[0].expired()}
        return found

    def _key(self, tensor: Tensor) -> int | None:
        """The address under which a tensor on the meta device, or a view, has rows here."""
        if not tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
            return None
        address = tensor.untyped_storage()._cdata
        return address if address in self._held else None

    def _keep(self, meta: Tensor, part: Tensor) -> None:
        storage = meta.untyped_storage()
        self._held[storage._cdata] = (StorageWeakRef(storage), part)

    def hold(self, meta: Tensor, whole: Tensor) -> None:
        """Begin to hold rows of `whole` for a new tensor of its size on the meta device."""
        self._cut()
        self._keep(meta, whole.new_empty(0))
        self._whole = meta.untyped_storage()._cdata, whole.contiguous()

    def _fill(self, key: int, meta: Tensor) -> None:
        self._cut()
        device = self._held[key][1].device
        self._whole = key, torch.empty(meta.shape, dtype=meta.dtype, device=device)

    def _real(self, view: Tensor) -> Tensor:
        assert self._whole is not None, "a tensor is being filled"
        return self._whole[1].as_strided(view.shape, view.stride(), view.storage_offset())

    def _cut(self) -> None:
        """Keep the rows of the tensor that was filled last."""
        if self._whole is None:
            return
        (key, whole), self._whole = self._whole, None
        if key in self._held:
            self._held[key] = (self._held[key][0], self._rows(whole).clone())

    def _rows(self, whole: Tensor) -> Tensor:
        mine = (
            rows(len(whole), self.mesh.get_local_rank(), self.mesh.size()) if whole.dim() else ...
        )
        return whole[mine]

    def part(self, parameter: Tensor) -> Tensor:
        """This rank's rows of a parameter; all of one without dimensions."""
        self._cut()
        key = self._key(parameter)
        if key is None:
            raise RuntimeError(f"a parameter of shape {[*parameter.shape]} was built without rows")
        return self._held[key][1]

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Context of a random model's construction: each parameter is cut when it is complete.

        Each draw is that of the whole tensor, so that the generator moves as in one process.
        """
        register, truncated = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_

        def cut(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not parameter.is_meta:
                parameter = self._moved(parameter)
            register(module, name, parameter)

        def fill(tensor: Tensor, *how: Any, **more: Any) -> Tensor:
            key = self._key(tensor)
            if key is None:
                return truncated(tensor, *how, **more)
            self._fill(key, tensor)  # torch 2.13 does nothing where there is no data
            truncated(self._real(tensor), *how, **more)
            return tensor

        with (
            self,
            patch.object(nn.Module, "register_parameter", cut),
            patch.object(nn.init, "_no_grad_trunc_normal_", fill),
        ):
            yield
        self._cut()

    def _moved(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter without data, rows of which are held."""
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=META)
        data = parameter.detach()
        if hasattr(data, "to_local"):  # a DTensor
            self._keep(empty, data.to_local())
        else:
            self.hold(empty, data.as_subclass(Tensor))
        return nn.Parameter(empty, parameter.requires_grad)

    def adopt(self, model: nn.Module) -> None:
        """Keep the rows of all parameters that have data, whole or cut, in place."""
        moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    if id(parameter) not in moved:
                        moved[id(parameter)] = parameter, self._moved(parameter)
                    module._parameters[name] = moved[id(parameter)][1]
                    del parameter
        self._cut()

    @contextmanager
    def read(self) -> Iterator[None]:
        """Context in which `from_pretrained` reads rows alone of what it need not convert whole.

        Transformers 5.23 reads slices for DTensors. What it draws, converts across rows, or may
        find to have another size in the files is read whole: it compares the sizes of parts.
        Raises RunError: files of other ranks are others.
        """
        from transformers import PreTrainedModel, modeling_utils

        plain: Any = PreTrainedModel._load_pretrained_model

        def cut_and_read(model: Any, state: Any, files: Any, config: Any, *more: Any) -> Any:
            shapes = _shapes(files)
            names = _cuttable(model, shapes, config.weight_mapping or [], self.mesh.size())
            for name in names:
                module, _, leaf = name.rpartition(".")
                owner = model.get_submodule(module)._parameters
                owner[leaf] = _placed(self._rows(owner[leaf]), owner[leaf], self.mesh)
            return plain(model, state, files, config, *more)

        with (
            patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(cut_and_read)),
            # It would allocate the whole model on a GPU, to free it at once.
            patch.object(modeling_utils, "caching_allocator_warmup", lambda *_: None),
        ):
            yield

    def gathered(self, parameter: Tensor) -> Tensor:
        """The whole of a parameter on this rank's device; all ranks must ask for it."""
        return _whole(self.part(parameter), parameter, self.mesh)

    @contextmanager
    def whole(
        self, modules: Sequence[nn.Module], make: Callable[[Any], Any] | None = None
    ) -> Iterator[None]:
        """Context in which the own parameters of modules have all their data; a collective.

        Whether they are trained may be changed in it.
        """
        places = [place for place in _places(modules) if place[2].is_meta]
        made: dict[int, Any] = {}
        for owner, name, parameter in places:
            if id(parameter) not in made:
                made[id(parameter)] = (
                    make(parameter)
                    if make
                    else nn.Parameter(self.gathered(parameter), parameter.requires_grad)
                )
            owner[name] = made[id(parameter)]
        try:
            yield
        finally:
            for owner, name, parameter in places:
                if owner.get(name) is made[id(parameter)]:  # else it was replaced: quantised
                    owner[name] = parameter
                    parameter.requires_grad_(made[id(parameter)].requires_grad)

    @contextmanager
    def computing(self, model: nn.Module) -> Iterator[None]:
        """Context in which `model` computes, all ranks alike, without a backward pass.

        A Transformer layer has its weights while it runs, what lies around all the time. Leaves of
        autograd's graph are the parameters; what it would save is dropped.
        """
        layers = find_layers(model)
        inner = {id(m) for layer in layers for m in layer.modules()}

        def make(parameter: nn.Parameter) -> Any:
            return cast(Any, _Gathered).apply(parameter, self)

        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(lambda _: None, lambda _: None))
            stack.enter_context(self.whole([m for m in model.modules() if id(m) not in inner]))
            for layer in layers:
                open_ = ExitStack()

                def enter(module: nn.Module, _: Any, open_: ExitStack = open_) -> None:
                    open_.enter_context(self.whole([*module.modules()], make))

                def leave(_: Any, __: Any, ___: Any, open_: ExitStack = open_) -> None:
                    open_.close()

                stack.callback(layer.register_forward_pre_hook(enter).remove)
                stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
            yield

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """Rows by name of the parameter; a tied one has several."""
        every = model.named_parameters(remove_duplicate=False)
        return {name: self.part(parameter) for name, parameter in every}


class Rows:
    """Rows of the parameters of a model on the host, which use no memory until ZeRO-3 cuts them."""

    def __init__(self, parts: Parts, model: nn.Module) -> None:
        self.mesh = parts.mesh
        self.of: dict[nn.Parameter, Tensor] = {}
        made: dict[int, nn.Parameter] = {}
        for owner, name, old in _places(model.modules()):
            if id(old) not in made:
                empty = torch.empty(1, dtype=old.dtype).expand(old.shape)
                made[id(old)] = nn.Parameter(empty, old.requires_grad)
                self.of[made[id(old)]] = parts.part(old)
            owner[name] = made[id(old)]

    @contextmanager
    def placed(self, model: nn.Module) -> Iterator[None]:
        """Context in which the parameters of `model` are cut, and what is copied goes to rows."""
        places = _places(model.modules())
        cut = {
            p: _placed(part, p, self.mesh) if p.dim() else nn.Parameter(part)
            for p, part in self.of.items()
        }
        for owner, name, parameter in places:
            owner[name] = cut[parameter]
        try:
            yield
        finally:
            for owner, name, parameter in places:
                owner[name] = parameter

    @contextmanager
    def put_together(self, init: Any) -> Iterator[None]:
        """Context in which DeepSpeed's `zero.Init` finds each parameter whole when it shards it."""
        plain: Any = init._zero_init_param

        def fill(zero: Any, parameter: Any) -> None:
            parameter.data = _whole(self.of.pop(parameter), parameter, self.mesh)
            plain(zero, parameter)

        with patch.object(init, "_zero_init_param", fill):
            yield


Places = list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]


def _places(modules: Iterable[nn.Module]) -> Places:
    """Where each parameter is: a tied one has several places."""
    owners = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items()]
    return [(owner, name, p) for owner, name, p in owners if p is not None]


def put_parts(model: nn.Module, parts: dict[str, Tensor], device: torch.device) -> None:
    """Put rows into a model of FSDP2 whose parameters are on the meta device; `parts` is emptied.

    FSDP2 takes a replaced parameter at its first forward pass (`reset_sharded_param`, torch 2.13).
    """
    made: dict[int, nn.Parameter] = {}
    every: list[tuple[str, Any]] = [*model.named_parameters(remove_duplicate=False)]
    for name, old in every:
        part = parts.pop(name)
        if id(old) not in made:
            made[id(old)] = _placed(part.to(device), old, old.device_mesh, old.placements)
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module)._parameters[leaf] = made[id(old)]


def _whole(part: Tensor, like: Tensor, mesh: Any) -> Tensor:
    """The tensor of which all ranks have rows, on the device of the mesh; a collective."""
    if not like.dim():
        return part.to(mesh.device_type)
    return cast(Tensor, cast(Any, _placed(part, like, mesh)).detach().full_tensor())


def _placed(part: Tensor, like: Tensor, mesh: Any, placements: Any = None) -> nn.Parameter:
    """A parameter of the size of `like` that is cut over `mesh`, of which this rank has `part`."""
    from torch.distributed.tensor import DTensor, Shard

    whole = {"shape": like.shape, "stride": torch.empty_like(like, device=META).stride()}
    cut: Any = DTensor.from_local
    made = cut(part, mesh, placements or [Shard(0)], run_check=False, **whole)
    return nn.Parameter(made, like.requires_grad)


class _Gathered(torch.autograd.Function):
    """The whole of a parameter, which stays the leaf of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, parts: Parts) -> Tensor:
        return parts.gathered(parameter)


def _shapes(files: Sequence[str] | None) -> dict[str, list[int]]:
    """Sizes of the tensors in the files, from their headers, which all ranks compare.

    Raises RunError: another rank's files are others; OSError, SafetensorError: a file is none.
    """
    found: dict[str, list[int]] = {}
    error: Exception | None = None
    formats = []
    try:
        for path in files or ():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # safetensors 0.8: not iterable itself
                    piece = file.get_slice(name)
                    found[name] = piece.get_shape()
                    formats.append((name, piece.get_dtype()))
    except (OSError, SafetensorError) as raised:
        error = raised
    said = json.dumps([sorted(found.items()), sorted(formats), str(error or "")])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, hashlib.sha256(said.encode()).hexdigest())
    if error is not None:
        raise error
    mine = every[dist.get_rank()]
    others = [rank for rank, theirs in enumerate(every) if theirs not in (None, mine)]
    if others:
        listed = ", ".join(map(str, others))
        why = f"headers of its files differ between rank {dist.get_rank()} and ranks {listed}"
        raise RunError(f"{why} -> the same files on every machine")
    return found


def _cuttable(
    model: Any, shapes: dict[str, list[int]], mapping: Sequence[Any], world: int
) -> list[str]:
    """Names of parameters of which rows can be read: of the same size, or experts to be stacked."""
    from transformers import core_model_loading as loading

    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    places = model.state_dict()
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.dim()}
    same, stacked = [], []
    for name, shape in shapes.items():
        key, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, places
        )
        if key not in places and name in places:
            key, pattern = name, None
        if key not in trained:
            continue
        if pattern is None and [*places[key].shape] == shape:
            same.append(key)
        elif pattern is not None and _stacks(converter_of[pattern], len(places[key]), world):
            stacked.append(key)
    return [*dict.fromkeys(same + stacked)]


def _stacks(converter: Any, num_rows: int, world: int) -> bool:
    """Whether a conversion stacks tensors, some of them for each rank, and leaves rows alone."""
    first, *others = converter.operations
    stacks = type(first).__name__ == "MergeModulelist" and first.dim == 0
    stacks = stacks and rows(num_rows, world - 1, world).start < num_rows
    return stacks and all(type(o).__name__ == "Concatenate" and o.dim > 0 for o in others)
