"""Which run is forked, and why another one is not."""

import dataclasses

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.launch.processes.fork_server import Surroundings, modules_of, why_fresh

ALL = frozenset(range(8))
SERVER = Surroundings({"PATH": "/bin", "OMP_NUM_THREADS": "4", "EKE_LEASES": "/a"}, ALL)


@pytest.mark.parametrize(
    ("changes", "cores"),
    [
        ({}, ALL),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ALL),
        ({"EKE_SHARED_DEVICE": "1", "EKE_LEASES": "/b", "EKE_PROCESS": "forked"}, ALL),
        ({}, frozenset({0, 1})),
    ],
    ids=["same", "other GPU", "eke's own", "other cores, threads given"],
)
def test_what_is_read_later_or_by_eke_alone_may_differ(changes, cores, plan) -> None:
    worker = Surroundings({**SERVER.environment, **changes}, cores)
    assert why_fresh(plan, worker, SERVER) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "2"),
        ("OMP_NUM_THREADS", None),
        ("HF_HOME", "/elsewhere"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("TORCHINDUCTOR_CACHE_DIR", "/cache"),
        ("LD_PRELOAD", "libjemalloc.so"),
    ],
)
def test_what_an_import_may_read_needs_a_fresh_process(name, value, plan) -> None:
    found = {key: text for key, text in SERVER.environment.items() if key != name}
    worker = Surroundings(found if value is None else {**found, name: value}, ALL)
    why = f"{name} is not the server's, and may be read by an import"
    assert why_fresh(plan, worker, SERVER) == why
    assert why_fresh(plan, SERVER, worker) == why


def test_openmp_counts_cores_where_nobody_says_how_many_threads(plan) -> None:
    free = {"PATH": "/bin"}
    server, worker = Surroundings(free, ALL), Surroundings(free, frozenset({0, 1}))
    assert "OpenMP counts them" in why_fresh(plan, worker, server)


def test_runs_whose_processes_are_made_otherwise(plan) -> None:
    ranks = dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, world_size=2))
    assert why_fresh(ranks, SERVER, SERVER) == "it has 2 processes, which their agent starts"
    zero = dataclasses.replace(plan, deepspeed={"zero_optimization": {"stage": 2}})
    assert "DeepSpeed" in why_fresh(zero, SERVER, SERVER)


def test_each_familys_module_is_imported_once_and_a_tracker_where_it_is_used(plan) -> None:
    bert = plan_of(*SYNTHETIC, "model=tiny_bert", "task=masked_lm", "tracker=none")
    llama = plan_of(*SYNTHETIC, "tracker=tensorboard")
    models = [
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
    ]
    assert modules_of([llama, bert, llama]) == models
    assert modules_of([llama, bert, plan_of(*SYNTHETIC, "tracker=wandb")]) == [*models, "wandb"]
