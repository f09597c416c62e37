"""torch.compile in a memory trace: the graphs a run would have, and what their code allocates.

All up to the partitioner works as in a run, and decides what is kept for the backward pass; no code
is generated. Products, attention and all else with its own kernel run on fake tensors. A
result of what inductor fuses has memory where such a kernel reads it, where it is an output or a
reduction, or where inductor would not compute it again for each of its readers. Inductor's code may
run in another order, which needs less.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from eke.training.trace.fakes import UNMARKED_VIEWS
from eke.training.trace.operations import PRODUCTS

TRACED = ("eager", "aot_eager", "inductor")
"""Options of `compile` that `compile_for_trace` can stand in for."""

_TRUE_COMPILE: Any = torch.compile


def compile_for_trace(function: Any = None, backend: str = "inductor", **_: Any) -> Any:
    """In place of `torch.compile`. Every length is compiled by itself."""
    if function is None:
        return partial(compile_for_trace, backend=backend)
    chosen = _without_code if backend == "inductor" else backend
    return _TRUE_COMPILE(function, backend=chosen, dynamic=False)


def _without_code(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor, without code generation."""
    from torch._functorch.config import patch as patch_autograd
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.config import patch as patch_inductor

    whole: Any = compile_fx  # torch 2.13: annotated for inductor's own inner function
    with (
        patch_autograd(enable_autograd_cache=False),  # which has code of true runs
        patch_inductor(joint_graph_constant_folding=False),  # which computes on the device
    ):
        return cast(Callable[..., Any], whole(graph, inputs, inner_compile=_interpreted))


def _interpreted(graph: GraphModule, *_: Any, is_backward: bool = False, **__: Any) -> Any:
    from torch._inductor.utils import get_donated_idxs

    return FusedGraph(graph, (get_donated_idxs() or ()) if is_backward else ())


class FusedGraph:
    """Allocates and frees what inductor's code of a graph would; results may overwrite `given`."""

    def __init__(self, graph: GraphModule, given: Sequence[int] = ()) -> None:
        self._boxed_call = True  # arguments come as one list: how AOTAutograd knows it
        self._owner = graph
        self._inputs = graph.graph.find_nodes(op="placeholder")
        self._fixed = {node for at, node in enumerate(self._inputs) if at not in given}
        needed = {
            _behind_views(read)
            for node in graph.graph.nodes
            if node.op == "output" or _has_own_kernel(node)
            for read in node.all_input_nodes
        }
        self._read: dict[Node, tuple[Node, ...]] = {}
        """Node -> those with memory that its value is computed from: itself, if it has some."""
        self._steps: list[Node] = []
        """What allocates memory, and the output."""
        for node in graph.graph.nodes:
            inputs = self._inputs_of(node)
            part = node.target is getitem and not _is_view(node)
            is_call = node.op == "call_function" and not part
            is_fused = is_call and (_is_view(node) or not _allocates(node, len(inputs), needed))
            if node.op == "output" or (is_call and not is_fused):
                self._steps.append(node)
            self._read[node] = inputs if is_fused else (node,)
        self._ends: dict[Node, list[Node]] = {}
        """Step -> what nothing reads after it."""
        later: set[Node] = set()
        for step in reversed(self._steps):
            read = dict.fromkeys((*self._inputs_of(step), step, *step.users))
            self._ends[step] = [node for node in read if node not in later]
            later.update(read)

    def _inputs_of(self, node: Node) -> tuple[Node, ...]:
        reads = (read for each in node.all_input_nodes for read in self._read[each])
        return tuple(dict.fromkeys(reads))

    def __call__(self, arguments: list[Any]) -> Any:
        """The outputs. What nothing else holds of the arguments goes when it was last read."""
        memory: dict[Node, Any] = dict(zip(self._inputs, arguments, strict=True))
        arguments.clear()
        for step in self._steps[:-1]:
            if _has_own_kernel(step):
                made = self._call(step, memory)
            else:
                made = step.meta["val"]
                gone = [n for n in self._ends[step] if n in memory and n not in self._fixed]
                same = [n for n in gone if _bytes(memory[n]) == _bytes(made)]
                for node in same[:1]:  # the result overwrites it
                    del memory[node]
                made = tree_map_only(Tensor, _like, made)
            if isinstance(made, tuple | list):
                memory.update((user, made[cast(int, user.args[1])]) for user in step.users)
            else:
                memory[step] = made
            del made
            for node in self._ends[step]:
                memory.pop(node, None)
        return map_arg(self._steps[-1].args[0], partial(self._value, memory=memory))

    def _value(self, node: Node, memory: dict[Node, Any]) -> Any:
        """A node's, which has memory or is a view of one that has."""
        if node in memory:
            return memory[node]
        if node.op == "get_attr":
            return getattr(self._owner, str(node.target))
        return self._call(node, memory)

    def _call(self, node: Node, memory: dict[Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), partial(self._value, memory=memory))
        return target(*args, **kwargs)


def _allocates(node: Node, num_inputs: int, needed: set[Node]) -> bool:
    """Whether a call has memory; the limits are inductor's (ir.py, `mark_reuse`)."""
    from torch._inductor import config

    target: Any = node.target
    several = len(node.users) > 1 and num_inputs > config.realize_reads_threshold
    many = num_inputs > config._realize_acc_reads_threshold_default
    is_tuple = isinstance(node.meta.get("val"), tuple | list)  # a saved random state has none
    reduces = is_tuple or torch.Tag.reduction in getattr(target, "tags", ())
    return _has_own_kernel(node) or node in needed or reduces or several or many


def _has_own_kernel(node: Node) -> bool:
    """Whether inductor calls a kernel, where it would else generate code."""
    from torch._inductor import lowering

    if node.op != "call_function" or node.target is getitem or _is_view(node):
        return False
    kernel: Any = node.target
    called: Any = (PRODUCTS, lowering.needs_realized_inputs, lowering.fallbacks)
    return kernel not in lowering.lowerings or any(kernel in each for each in called)


def _is_view(node: Node) -> bool:
    """Whether a node's memory is that of its first argument."""
    if node.target is getitem:
        return _is_view(cast(Node, node.args[0]))
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    results = [result.alias_info for result in node.target._schema.returns]
    return node.target in UNMARKED_VIEWS or (bool(results) and None not in results)


def _behind_views(node: Node) -> Node:
    while _is_view(node):
        node = cast(Node, node.args[0])
    return node


def _bytes(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else -1


def _like(tensor: Tensor) -> Tensor:
    made = tensor.shape, tensor.stride()
    return torch.empty_strided(*made, dtype=tensor.dtype, device=tensor.device)
