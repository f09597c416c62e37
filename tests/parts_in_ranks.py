"""Models that ranks hold parts of from the start, against one process's, in forked ranks.

`python parts_in_ranks.py FOLDER CASES`, with CASES an object of number of ranks -> names, builds
each case whole, forks so many ranks, has them build the same, and prints a JSON object: number of
ranks -> case -> differences. Everything is imported once; one process group per number of ranks.
Logits are compared with the first number of ranks of a case: the others have equal weights.
"""

import faulthandler
import importlib
import json
import os
import re
import sys
import traceback
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

faulthandler.enable()

CPU = torch.device("cpu")

OPTIONS = {"llama": "tiny", "qwen3": "tiny_qwen3", "mixtral": "tiny_moe", "bert": "tiny_bert",
           "gpt2": "tiny_gpt2", "t5": "tiny_t5"}  # fmt: skip
"""Family -> its option with random weights; mistral and qwen2 are read from files alone."""

FAMILIES = ("llama", "qwen3", "mixtral", "bert", "gpt2", "t5", "mistral", "qwen2")
TASKS = {"t5": "seq2seq_lm"}
SIZES = {"t5": {"d_ff": 65}, "gpt2": {"n_inner": 65}, "mixtral": {}}
"""Odd ones, which no number of ranks divides."""


_WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 65}  # fmt: skip

OTHERS: dict[str, dict[str, Any]] = {
    "phi": _WIDTH,
    "gpt_neox": _WIDTH,
    "gemma2": {**_WIDTH, "num_key_value_heads": 1, "head_dim": 16},
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 65,
            "word_embed_proj_dim": 32},
    "modernbert": {**_WIDTH, "cls_token_id": 1, "sep_token_id": 2},
    "deberta-v2": _WIDTH,
    "roberta": _WIDTH,
    "albert": {**_WIDTH, "embedding_size": 24},
}  # fmt: skip
"""Families without closed forms here: tokens show what they compute, while they are cut."""


def save_other(place: Path, family: str, task: str) -> None:
    import transformers

    from eke.training.model.model_checks import HEADS

    common = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **common, **OTHERS[family])
    torch.manual_seed(0)
    getattr(transformers, HEADS[task]).from_config(config).save_pretrained(place)


def save_again(place: Path, kind: str) -> None:
    """The same checkpoint in several files, in 16 bits, or without its head and prefix."""
    import transformers

    if kind not in ("files", "half", "base"):
        return
    cls = transformers.AutoModel if kind == "base" else transformers.AutoModelForCausalLM
    model = cls.from_pretrained(place, dtype=torch.bfloat16 if kind == "half" else torch.float32)
    (place / "model.safetensors").unlink()
    model.save_pretrained(place, max_shard_size="40KB" if kind == "files" else "5GB")


def make_case(name: str, folder: Path) -> Any:
    """The plan of `KIND-FAMILY`, whose checkpoint is written into the folder."""
    from checkpoints import checkpoint_plan, save_checkpoint

    from eke.config.compose import compose
    from eke.workflows.planning import plan_for

    kind, family = name.removeprefix("zero3_").split("-", 1)
    engine = ("distributed=zero3", "distributed.num_processes=2") if "zero3" in name else ()
    task = TASKS.get(family, "masked_lm" if "bert" in family else "causal_lm")
    more = {
        "random": (),
        "random_tied": ("model.tie_word_embeddings=true",),
        "random_bf16": ("precision=bf16_pure",),
        "random_lora": ("peft=lora",),
        "random_qlora": ("peft=qlora",),
        "random_classes": ("task=sequence_classification", "task.num_labels=5"),
    }
    if kind in more:
        typed = [f"model={OPTIONS[family]}", *more[kind], "data=synthetic", "data.seq_len=16"]
        typed += engine
        if "classes" not in kind:
            typed.append(f"task={task}")
        return plan_for(compose([*typed, "hardware=cpu", "tracker=none"]), planning=True)
    place = folder / name
    if family in OTHERS:
        save_other(place, family, task)
    else:
        sizes = SIZES.get(family, {"intermediate_size": 65})
        tied = kind == "tied" or family in ("gpt2", "t5", "bert")
        head = "sequence_classification" if kind == "four_for_three" else task
        labels = {"num_labels": 3} if kind == "four_for_three" else {}
        save_checkpoint(place, family, task=head, tie_word_embeddings=tied, **sizes, **labels)
    save_again(place, kind)
    typed = {
        "read": (),
        "tied": (),
        "lora": ("peft=lora",),
        "files": (),
        "half": (),
        "base": (),
        "frozen": ("model.freeze=[embed_tokens,layers.0]", "precision=bf16"),
        "four_for_three": ("task=sequence_classification", "task.num_labels=4"),
        "dora": ("peft=dora",),
        "qlora": ("peft=qlora",),
        "ia3": ("peft=ia3",),
        "bf16": ("precision=bf16_pure",),
        "lora_bf16": ("peft=lora", "precision=bf16", "peft.base_weights=bfloat16"),
        "classes": ("task=sequence_classification", "task.num_labels=4"),
        "lora_classes": ("task=sequence_classification", "task.num_labels=4", "peft=lora"),
    }[kind]
    named = () if "task=" in str(typed) else (f"task={task}",)
    return checkpoint_plan(place, *named, *typed, *engine)


@contextmanager
def states_after(seen: list[Any]) -> Any:
    """Context that notes the generator's state wherever building ends to draw."""
    from eke.training.model import adapters, build_model, load_pretrained, model_checks

    plain = model_checks.preserve_rng_state

    @contextmanager
    def noted(device: torch.device, seed: int | None = None) -> Any:
        with plain(device, seed):
            yield
            if seed is not None:
                seen.append(torch.get_rng_state())

    with (
        patch.object(build_model, "preserve_rng_state", noted),
        patch.object(load_pretrained, "preserve_rng_state", noted),
        patch.object(adapters, "preserve_rng_state", noted),
    ):
        yield


def build_whole(plan: Any) -> tuple[nn.Module, Any, list[Any]]:
    """One process's model, report and states of the generator."""
    from eke.training.loop.training_state import build_checked

    seen: list[Any] = []
    with states_after(seen):
        model, report = build_checked(plan, CPU)
    return model, report, seen


def build_cut(plan: Any) -> tuple[nn.Module, Any, list[Any]]:
    """This rank's."""
    from eke.config.schema import FSDP
    from eke.training.distributed.deepspeed_engine import parts_of, share_model
    from eke.training.distributed.ranks import Ranks
    from eke.training.loop.training_state import build_checked

    rank, world = dist.get_rank(), dist.get_world_size()
    plan = replace(plan, batch=replace(plan.batch, world_size=world))
    if plan.deepspeed is None:
        plan = replace(plan, config=replace(plan.config, distributed=FSDP(num_processes=world)))
    else:  # the plan is one of two ranks
        total = world * plan.deepspeed["train_micro_batch_size_per_gpu"]
        plan = replace(plan, deepspeed={**plan.deepspeed, "train_batch_size": total})
    seen: list[Any] = []
    parts = parts_of(plan, CPU, Ranks(rank, world))
    with states_after(seen):
        model, report = build_checked(plan, CPU, parts)
    if plan.deepspeed is None:
        share_model(plan, None, model, parts)
    else:
        import deepspeed

        with parts.sharded_flat(deepspeed.zero.Init):
            deepspeed.zero.Init(module=model, config_dict_or_path=plan.deepspeed)
    return model, report, seen


def differences(whole: Any, cut: Any) -> list[str]:
    """What of one process's model this rank has otherwise."""
    from eke.training.model.adapters import quant_tensors

    (one, report, states), (mine, its_report, its_states) = whole, cut
    alike = {
        f"report {its_report} for {report}": report == its_report,
        "the generator is elsewhere": same_tensors(states, its_states),
        "tied": tied_names(one) == tied_names(mine),
        "buffers": same_tensors(one.buffers(), mine.buffers()),
        "scales of 4-bit weights": same_tensors(quant_tensors(one), quant_tensors(mine)),
        "classes of modules": kinds_of(one) == kinds_of(mine),
    }
    found = [what for what, same in alike.items() if not same]
    have = dict(mine.named_parameters())
    return found + [n for n, p in one.named_parameters() if not is_part(have.get(n), p)]


def same_tensors(some: Any, others: Any) -> bool:
    some, others = list(some), list(others)
    return len(some) == len(others) and all(map(torch.equal, some, others))


def tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


def kinds_of(model: nn.Module) -> list[str]:
    return [type(m).__name__.removeprefix("FSDP") for m in model.modules()]


def is_part(mine: Any, whole: nn.Parameter) -> bool:
    """Whether a parameter is this rank's part of the whole one, and trained as that."""
    from torch.distributed.tensor import DTensor

    if hasattr(mine, "ds_tensor"):  # as many numbers for each rank, the last ones of nothing
        size = mine.partition_numel()
        want = whole.detach().flatten()[size * dist.get_rank() :][:size]
        kind = (tuple(mine.ds_shape), mine.ds_tensor.dtype, mine.requires_grad)
        same = kind == (tuple(whole.shape), whole.dtype, whole.requires_grad)
        return same and torch.equal(mine.ds_tensor.detach()[: len(want)], want)
    if not isinstance(mine, DTensor) or mine.shape != whole.shape:
        return False
    size = -(-len(whole) // dist.get_world_size())
    want = whole.detach()[size * dist.get_rank() :][:size]
    local = mine.to_local().detach()
    kind = (local.dtype, local.device, mine.requires_grad)
    return torch.equal(local, want) and kind == (want.dtype, whole.device, whole.requires_grad)


def computes_otherwise(one: nn.Module, mine: nn.Module) -> list[str]:
    """Whether the models compute otherwise."""
    from eke.training.model.model_checks import probe_inputs

    mixed = len({p.dtype for p in one.parameters()}) > 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        inputs = probe_inputs(one.eval(), 0)
        a, b = (m(**inputs).logits.float() for m in (one, mine.eval()))
    return [] if torch.allclose(a, b, atol=1e-5) else ["logits"]


UNEQUAL = ("other files", "a short file")
"""What the last rank alone finds."""


def refuses(folder: Path) -> list[str]:
    """Whether every rank says that files differ, and none waits for one that has failed."""
    from eke.training.distributed.parts import _sizes

    last = dist.get_rank() == dist.get_world_size() - 1
    expected = "HeaderTooLarge|Incomplete|header" if folder.name == "a short file" else "same files"
    expected = expected if last else "-> the same files on every machine"
    try:
        _sizes([str(folder / ("last" if last else "others"))])
    except Exception as error:
        return [] if re.search(expected, str(error)) else [repr(error)]
    return ["nothing was raised"]


def write_unequal(folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({"weight": torch.zeros(4, 2)}, folder / "others")
    save_file({"weight": torch.zeros(5, 2)}, folder / "last")
    if folder.name == "a short file":
        (folder / "last").write_bytes((folder / "others").read_bytes()[:-8])
    return folder


def be_rank(
    rank: int, world: int, meeting: Path, cases: dict[str, Any], computed: set[str]
) -> dict[str, list[str]]:
    dist.init_process_group("gloo", f"file://{meeting}", None, world, rank)
    if any("zero3" in name for name in cases):
        from eke.training.distributed.deepspeed_engine import import_deepspeed

        deepspeed = import_deepspeed(CPU)
        communication = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None  # as `build_engine` does
        deepspeed.init_distributed(auto_mpi_discovery=False)
    found = {}
    for name, (plan, whole) in cases.items():
        try:
            if name in UNEQUAL:
                found[name] = refuses(plan)
                continue
            cut = build_cut(plan)
            found[name] = differences(whole, cut)
            if plan.deepspeed is None and name in computed:  # the other takes an engine
                found[name] += computes_otherwise(whole[0], cut[0])
        except Exception:
            found[name] = [traceback.format_exc()[-1500:]]
    dist.destroy_process_group()
    return found


def main(folder: Path, names_of: dict[str, list[str]]) -> dict[str, dict[str, list[str]]]:
    import accelerate.utils.other
    import transformers

    transformers.logging.set_verbosity_error()
    # It would be imported wherever a model is saved, which takes seconds.
    vars(accelerate.utils.other)["is_deepspeed_available"] = lambda: False
    names = list(dict.fromkeys(name for of in names_of.values() for name in of))
    unequal = {name: (write_unequal(folder / name), None) for name in names if name in UNEQUAL}
    plans = {name: make_case(name, folder) for name in names if name not in UNEQUAL}
    cases = {name: (plan, build_whole(plan)) for name, plan in plans.items()} | unequal
    if any("zero3" in name for name in names):  # once, and not in each rank
        os.environ["DS_ACCELERATOR"] = CPU.type
        importlib.import_module("deepspeed")
    results, computed = {}, set(UNEQUAL)
    for world, mine in names_of.items():
        pipes, here = [], {name: cases[name] for name in mine}
        new = set(mine) - computed
        computed |= new
        for rank in range(int(world)):
            reading, writing = os.pipe()
            if os.fork() == 0:
                code = 1
                try:
                    answer = be_rank(rank, int(world), folder / f"meeting-{world}", here, new)
                    os.write(writing, json.dumps(answer).encode())
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            os.close(writing)
            pipes.append(reading)
        said = []
        for reading in pipes:
            with os.fdopen(reading) as file:
                said.append(json.loads(file.read() or "{}"))
            os.wait()
        results[world] = {
            name: [f"rank {r}: {what}" for r, of in enumerate(said) for what in of.get(name, ["?"])]
            for name in mine
        }
    return results


if __name__ == "__main__":
    answer = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    print("RESULT", json.dumps(answer))
