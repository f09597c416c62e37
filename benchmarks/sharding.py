"""Models in parts over several ranks: memory of each phase, what is sent, and what saving blocks.

python benchmarks/sharding.py [--size tiny|300m|8b] [--ranks N] [--casts per_use|per_step]
                              [--ways former eke titan] [--steps N] [--out FILE]

Each way trains the same Llama on N ranks (gloo and CPU, or NCCL where there are as many GPUs):

    former  as eke did before it sharded from the start: the whole model on every rank, gathers in
            float32, autocast's copies, states collected by rank 0 and written by `torch.save`
    eke     `eke.training.loop.worker`, unchanged, with a watch around its own functions
    titan   a loop as torchtitan's: meta device, `to_empty`, a policy for formats, DCP

Memory is what a rank has above its start: anonymous memory of the process on a CPU, torch's
allocator on a GPU. Freed tensors go back to the system at once (MALLOC_MMAP_THRESHOLD_), or memory
would not be comparable. Sent is the whole of what is gathered or reduced, in the second step. On a
busy machine only ratios count.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "src"), str(Path(__file__).parent)]

from arguments import at_least, writable  # noqa: E402  # after the path is there

Row = dict[str, Any]

SIZES = {
    "tiny": {"vocab_size": 499, "hidden_size": 64, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128},
    "300m": {"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 18,
             "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 2816},
    "8b": {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
}  # fmt: skip
"""Llamas with a head of its own."""

SEQ_LEN = {"tiny": 64, "300m": 64, "8b": 4096}
"""Tokens of a row; each rank has one row a step."""

PHASES = ("load", "step", "evaluation", "save sync", "save async")
LR = 1e-4


class Watch:
    """What one rank takes and sends: highest memory above its start, bytes, seconds."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.base, self.phase = on_gpu, 0, ""
        self.peaks: Counter[str] = Counter()
        self.host: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self.sent: dict[str, list[int]] = {}
        self.sends = True
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            if self.phase:
                self.host[self.phase] = max(self.host[self.phase], anonymous() - self.base)
            time.sleep(0.004)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """All within is of this phase."""
        import torch

        self.base = self.base or anonymous()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        done = len(self.seconds.get(phase, []))
        # The optimizer's state is new in the first; eke looks closer at the second, as we do.
        name = "first steps" if phase == "step" and done < 2 else phase
        self.phase, start = name, time.perf_counter()
        with self._count() if phase == "step" and done == 1 else contextlib.nullcontext():
            yield
        if self.on_gpu:
            torch.cuda.synchronize()
            self.peaks[name] = max(self.peaks[name], torch.cuda.max_memory_allocated())
        self.phase = ""
        self.seconds.setdefault(phase, []).append(time.perf_counter() - start)

    @contextlib.contextmanager
    def _count(self) -> Iterator[None]:
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode

        sent = self.sent

        class Counted(TorchDispatchMode):
            """The whole of an all-gather's output, of a reduce-scatter's input."""

            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                name = func.overloadpacket.__name__ if func.namespace == "c10d" else ""
                if any(kind in name for kind in ("allgather", "reduce_scatter", "allreduce")):
                    whole = args["reduce_scatter" in name]
                    whole = whole if isinstance(whole, Tensor) else whole[0]
                    kind = "reduced" if "reduce" in name else "gathered"
                    # FSDP2's sums in place are `allreduce_`; counts of samples are integers.
                    if whole.is_floating_point() or "allreduce" not in name:
                        found = sent.setdefault(f"{kind} {str(whole.dtype)[6:]}", [0, 0])
                        found[:] = found[0] + 1, found[1] + whole.nbytes
                return func(*args, **(kwargs or {}))

        with Counted():
            yield

    @contextlib.contextmanager
    def saving(self, kind: str) -> Iterator[list[float]]:
        """A save of this kind; within, the moment at which training may go on is to be noted."""
        start, noted = time.perf_counter(), list[float]()
        with self(f"save {kind}"):
            yield noted
        end = time.perf_counter()
        self.seconds[f"blocked {kind}"] = [(noted or [end])[0] - start]

    def row(self) -> Row:
        """All of it, as JSON values."""
        peaks = self.peaks if self.on_gpu else self.host
        return {"peaks": dict(peaks), "host": dict(self.host), "sent": self.sent,
                "seconds": self.seconds}  # fmt: skip


def anonymous() -> int:
    """Bytes of this process that no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


# ------------------------------------------------------------------------------ the three ways


def train_eke(asked: argparse.Namespace, folder: Path, watch: Watch) -> None:
    """The worker of eke, watched: first checkpoint sync, second async where there is the key."""
    from eke.training.loop import attempt, loop, worker

    maker = "build_job" if hasattr(attempt, "build_job") else "TrainingState"  # of an older eke
    build, step, evaluate = getattr(attempt, maker), loop.train_step, loop.evaluate_at
    save = loop.save

    def watched(phase: str, function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            with watch(phase):
                return function(*args, **keywords)

        return call

    def saved(job: Any, done: int, *args: Any, **keywords: Any) -> None:
        if done > 2:
            return
        train, kind = job.plan.config.train, "sync" if done == 1 else "async"
        if hasattr(train, "checkpoint_async"):
            train = replace(train, checkpoint_async=kind == "async")
            job.plan = replace(job.plan, config=replace(job.plan.config, train=train))
        with watch.saving(kind) as noted:
            save(job, done, *args, **keywords)
            noted.append(time.perf_counter())
            getattr(loop, "finish_saving", lambda job: None)(job)

    with (
        mock.patch.object(attempt, maker, watched("load", build)),
        mock.patch.object(loop, "train_step", watched("step", step)),
        mock.patch.object(loop, "evaluate_at", watched("evaluation", evaluate)),
        mock.patch.object(loop, "save", saved),
    ):
        code = worker.main([str(folder)])
    if code:
        raise SystemExit(f"the worker ended with {code}")


def train_by_hand(asked: argparse.Namespace, folder: Path, watch: Watch) -> None:
    """The former way, and that of torchtitan."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if watch.on_gpu else torch.device("cpu")
    if watch.on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if watch.on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (world,))
    config = LlamaConfig(**SIZES[asked.size], tie_word_embeddings=False, use_cache=False)
    torch.manual_seed(1)
    with watch("load"):
        model = (build_former if asked.way == "former" else build_titan)(config, mesh, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ids = torch.randint(0, config.vocab_size, (asked.steps, world, SEQ_LEN[asked.size]))

    def loss_of(rows: Any) -> Any:
        rows = rows.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=asked.way == "former"):
            logits = model(input_ids=rows).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    for number in range(asked.steps):
        with watch("step"):
            loss = loss_of(ids[number, rank : rank + 1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        kind = ("sync", "async", "")[min(number, 2)]
        if kind and (asked.way, kind) != ("former", "async"):  # there was no other
            save = save_former if asked.way == "former" else save_titan
            with watch.saving(kind) as noted:
                save(model, optimizer, folder / f"{asked.way}-{number}", kind, noted)
    model.eval()
    with watch("evaluation"), torch.no_grad():
        loss_of(ids[0, rank : rank + 1])
    dist.barrier()
    dist.destroy_process_group()


def build_former(config: Any, mesh: Any, device: Any) -> Any:
    """Drawn whole by each rank, then cut; what is around the layers is one unit."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model.train()


def build_titan(config: Any, mesh: Any, device: Any) -> Any:
    """As torchtitan's `parallelize_llama`: embedding, layers, and norm and head are units."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    fully_shard(model.model.embed_tokens, **how)
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard([model.model.norm, model.lm_head], **how, reshard_after_forward=False)
    fully_shard(model, **how)
    model.to_empty(device=device)
    for module in model.modules():  # or its buffers stay empty
        vars(module).pop("_is_hf_initialized", None)
    for parameter in model.parameters():
        vars(parameter).pop("_is_hf_initialized", None)
    model.initialize_weights()
    return model.train()


def save_former(model: Any, optimizer: Any, place: Path, kind: str, noted: list[float]) -> None:
    """Put together tensor by tensor, kept and written by rank 0; there was no other kind."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_map_only

    def keep(tensor: Any) -> Any:
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return tensor.cpu() if dist.get_rank() == 0 else None

    weights = {name: keep(tensor.detach()) for name, tensor in model.state_dict().items()}
    states = tree_map_only(torch.Tensor, keep, optimizer.state_dict())
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": states}, place)
    dist.barrier()


def save_titan(model: Any, optimizer: Any, place: Path, kind: str, noted: list[float]) -> None:
    """torch.distributed.checkpoint, async by a thread."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": states}
    if kind == "sync":
        dcp.save(content, checkpoint_id=place)
        return
    writing: Any = dcp.async_save(content, checkpoint_id=place)
    noted.append(time.perf_counter())
    getattr(writing, "upload_completion", writing).result()


# --------------------------------------------------------------------------------------- ranks


def be_rank(rank: int, port: int, asked: argparse.Namespace, folder: Path, on_gpu: bool) -> None:
    """One rank, in a process that has torch already; leaves as eke's worker does."""
    from eke.training.loop.stop import end_with_parent

    end_with_parent(signal.SIGKILL, str(os.getppid()))  # the server, which ends with this script
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked.ranks,
             "LOCAL_WORLD_SIZE": asked.ranks, "MASTER_ADDR": "localhost",
             "MASTER_PORT": port}  # fmt: skip
    os.environ.update({name: str(value) for name, value in names.items()})
    log = os.open(folder / f"{asked.way}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    watch, code = Watch(on_gpu), 1
    try:
        (train_eke if asked.way == "eke" else train_by_hand)(asked, folder, watch)
        (folder / f"{asked.way}-{rank}.json").write_text(json.dumps(watch.row()))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def overrides(asked: argparse.Namespace, on_gpu: bool) -> list[str]:
    """The same training as eke is told of it."""
    sizes = dict(SIZES[asked.size])
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    return [
        "model=llama_1b", *(f"model.{name}={size}" for name, size in sizes.items()),
        "model.tie_word_embeddings=false", "precision=bf16", f"precision.casts={asked.casts}",
        "distributed=fsdp", f"distributed.num_processes={asked.ranks}",
        "data=synthetic", f"data.seq_len={SEQ_LEN[asked.size]}", "data.max_token=400",
        "data.num_samples=64", f"data.num_eval_samples={asked.ranks}", "batch.per_device=1",
        "batch.eval_per_device=1", f"train.steps={asked.steps}", "train.timing_warmup_steps=2",
        "train.checkpoint_every=1", "train.save_final=false", "train.keep_checkpoints=1",
        "tracker=none", "ignore_forecast=true", *([] if on_gpu else ["hardware=cpu"]),
    ]  # fmt: skip


def plan_of(asked: argparse.Namespace, on_gpu: bool) -> Any:
    """Eke's plan of it."""
    from eke.config.compose import compose
    from eke.workflows.planning import plan_for

    return plan_for(compose(overrides(asked, on_gpu)), planning=True)


def run(asked: argparse.Namespace, on_gpu: bool) -> list[Row]:
    """All ranks of one way; what each has measured."""
    from eke.common.paths import RunPaths
    from eke.plan.planner import write_plan

    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        folder = Path(scratch)
        if asked.way == "eke":
            plan = plan_of(asked, on_gpu)
            folder = Path(scratch) / plan.run_id
            folder.mkdir()
            write_plan(RunPaths(folder), plan)
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        ranks: list[Any] = [
            context.Process(target=be_rank, args=(rank, port, asked, folder, on_gpu))
            for rank in range(asked.ranks)
        ]
        for each in ranks:
            each.start()
        while any(each.is_alive() for each in ranks):
            time.sleep(0.1)
            if any(each.exitcode for each in ranks):  # the others would wait for it
                time.sleep(5)
                [each.kill() for each in ranks]
        failed = [number for number, each in enumerate(ranks) if each.exitcode]
        if failed:
            logs = sorted(folder.glob("*.log*"))
            said = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)
            sys.exit(f"{asked.way}: ranks {failed} failed\n{said}")
        files = [folder / f"{asked.way}-{rank}.json" for rank in range(asked.ranks)]
        return [json.loads(file.read_text()) for file in files]


def summarised(rows: list[Row], asked: argparse.Namespace) -> Row:
    """Of all ranks: the worst peaks, one rank's bytes, the longest times, tokens per second."""
    for row in rows:  # the former way to save stands in both lines
        row["peaks"].setdefault("save async", row["peaks"].get("save sync", 0))
        for name in ("blocked", "save"):
            row["seconds"].setdefault(f"{name} async", row["seconds"][f"{name} sync"])
    # The first makes the optimizer's state, in the second bytes are counted.
    step_s = statistics.median(rows[0]["seconds"]["step"][2:])
    blocked = {}
    for kind in ("sync", "async"):
        times = [max(row["seconds"][f"{name} {kind}"][-1] for row in rows)
                 for name in ("blocked", "save")]  # fmt: skip
        blocked[kind] = {"blocked_s": times[0], "total_s": times[1]}
    return {
        "peaks": {phase: max(row["peaks"].get(phase, 0) for row in rows) for phase in PHASES},
        "sent": rows[0]["sent"],
        "saving": blocked,
        "tokens_per_s": asked.ranks * SEQ_LEN[asked.size] / step_s,
        "ranks": rows,
    }


MIB = 2**20


def print_table(found: dict[str, Row]) -> None:
    """Ways side by side, each as a share of the first."""
    first = next(iter(found.values()))
    print(f"{'':34}" + "".join(f"{way:>18}" for way in found))

    def line(name: str, values: list[float], digits: int = 0) -> None:
        shown = [
            f"{value:,.{digits}f}" + (f" ({value / values[0]:.2f})" if values[0] else "")
            for value in values
        ]
        print(f"{name:34}" + "".join(f"{text:>18}" for text in shown), flush=True)

    for phase in PHASES:
        line(f"{phase}, MiB, worst rank", [row["peaks"][phase] / MIB for row in found.values()])
    for number, _ in enumerate(first["ranks"]):
        for phase in PHASES:
            each = [row["ranks"][number]["peaks"].get(phase, 0) / MIB for row in found.values()]
            line(f"  rank {number}: {phase}", each)
    for kind in sorted({kind for row in found.values() for kind in row["sent"]}):
        sizes = [row["sent"].get(kind, (0, 0))[1] / MIB for row in found.values()]
        line(f"{kind}, MiB a step", sizes, 2)
    for what in ("gathered", "reduced"):
        each = [sum(size for kind, (_, size) in row["sent"].items() if kind.startswith(what))
                for row in found.values()]  # fmt: skip
        line(f"all {what}, MiB a step", [size / MIB for size in each], 2)
    for kind in ("sync", "async"):
        for name in ("blocked_s", "total_s"):
            line(f"save {kind}, {name}", [row["saving"][kind][name] for row in found.values()], 2)
    line("tokens/s", [row["tokens_per_s"] for row in found.values()], 1)


def main() -> None:
    """Measure each way in turn, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--casts", choices=("per_use", "per_step"), default="per_use")
    parser.add_argument("--ways", nargs="+", choices=("former", "eke", "titan"),
                        default=("former", "eke"))  # fmt: skip
    parser.add_argument("--steps", type=at_least(3), default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out:
        writable(parser, asked.out)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"  # read when the server of ranks starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from eke.common.files import write_json
    from eke.hardware import detect, environment

    device = detect()
    said = {"size": asked.size, "ranks": asked.ranks, "casts": asked.casts,
            "device": device.name, "environment": environment()}  # fmt: skip
    on_gpu = device.kind == "cuda" and device.count >= asked.ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        "eke.training.loop.attempt", "transformers.models.llama.modeling_llama",
        "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    ])  # fmt: skip
    found: dict[str, Row] = {}
    for way in asked.ways:
        asked.way = way
        found[way] = summarised(run(asked, on_gpu), asked)
        if asked.out:
            write_json(asked.out, {"benchmark": "sharding", **said, "ways": found})
    print_table(found)


if __name__ == "__main__":
    main()
