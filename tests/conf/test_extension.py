"""Adding an option is one YAML file and one entry in a table; and no option lacks its entry."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from support import REPO, TINY, environment

from eke.common.errors import ConfigError
from eke.common.plugins import load_plugin
from eke.config.compose import compose, help_text
from eke.config.compose.catalogue import make_catalogue
from eke.config.schema.model import AUTO_ATTENTION, Backend
from eke.estimate.memory.predict_memory import forecast
from eke.estimate.time.flops import Work
from eke.hardware.datasheets import DEVICES
from eke.models.checkpoints.architecture import read_sizes
from eke.models.families import FAMILIES
from eke.models.families.family_record import MAIN
from eke.models.families.llama import LLAMA
from eke.models.sizes import OPTIMIZER_REGISTRY, state_bytes
from eke.plan.planner.deepspeed_config import OFFLOADED
from eke.results.trackers import TRACKERS
from eke.training.batches.tasks import TASKS
from eke.training.loop.attempt import ENGINES
from eke.training.model.adapters import BUILDERS as PEFTS
from eke.training.model.attention_kernels import ATTENTION, EXPECTED
from eke.training.model.attention_kernels import BACKENDS as PINNED
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import CHECKPOINTING
from eke.training.model.model_checks import HEADS
from eke.training.optimizer.build_optimizer import SHAPES
from eke.workflows.planning import plan_for

CATALOGUE = make_catalogue()

# The option's file: its line of help, whose fields it has, and their values.
RMSPROP = """\
# optimizer=rmsprop -- Adam without its first moment.
# Does     scales each gradient by a running root mean square
# Costs    nothing beside sgd
# Saves    one of AdamW's two moments
# Needs    nothing
# Source   Tieleman and Hinton 2012, Neural Networks for Machine Learning, lecture 6.5
defaults:
  - /schema/optimizer/adamw@_here_
  - _self_
option: rmsprop
lr: 1.0e-3
beta2: 0.9
"""

SHORT = ("data=synthetic", "data.seq_len=8", "data.num_samples=16", "train.steps=2")


# A module of another package.
PLUGIN = """\
from math import prod

from eke.models.sizes import (OptimizerEntry)

ENTRY = OptimizerEntry(
    builder="rmsprop_for_eke:build",
    state_bytes=lambda config, weight, number_bytes: number_bytes * prod(weight.shape),
    built=("RMSprop torch",),
    fails_on_fsdp="it takes roots of whole matrices",
    fails_on_zero="takes roots of whole matrices",
    fails_in_backward="counts calls as steps",
)


def build(plan, groups):
    from torch.optim import RMSprop

    return RMSprop(groups, alpha=plan.config.optimizer.beta2)
"""


@pytest.fixture
def own_options(tmp_path: Path) -> Path:
    """A user's folder of options with optimizer=rmsprop."""
    folder = tmp_path / "my options"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "optimizer" / "rmsprop.yaml").write_text(RMSPROP)
    return folder


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that registers rmsprop."""
    site = tmp_path / "site"
    metadata = site / "rmsprop_for_eke-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "rmsprop_for_eke.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rmsprop-for-eke\nVersion: 1.0\n"
    )
    entry_points = "[eke.optimizers]\nrmsprop = rmsprop_for_eke:ENTRY\n"
    (metadata / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(site))
    load_plugin.cache_clear()
    yield
    load_plugin.cache_clear()
    sys.modules.pop("rmsprop_for_eke", None)


@pytest.fixture
def plan_with(own_options: Path):
    """Overrides -> plan, for this machine's CPU, with the user's options."""

    def make(*overrides: str):
        composed = compose([*TINY, *SHORT, *overrides, "hardware=cpu"], own_options)
        return plan_for(composed, planning=False)

    return make


@pytest.mark.slow
def test_new_optimizer_trains(plan_with, plugin, tmp_path) -> None:
    from trained import start_job

    from eke.plan.record import metrics
    from eke.training.loop.loop import train

    plan = plan_with("optimizer=rmsprop", "optimizer.lr=1e-2")
    job = start_job(plan, tmp_path / "run")
    before = [p.detach().clone() for p in job.parameters]
    train(job)
    assert isinstance(job.optimizer, torch.optim.RMSprop)
    assert plan.size.num_parameters * 4 == state_bytes(plan.config).optimizer
    assert job.optimizer.param_groups[0]["alpha"] == 0.9
    rows = metrics.latest(metrics.read_rows(job.paths.metrics)[0], metrics.LOSS)
    assert len(rows) == 2
    assert all(math.isfinite(row[metrics.LOSS]) for row in rows)
    assert not any(torch.equal(a, b) for a, b in zip(before, job.parameters, strict=True))


@pytest.mark.slow
def test_new_option_is_offered_and_distinguished(own_options, plan_with, plugin) -> None:
    assert "rmsprop" in help_text(own_options)
    assert "rmsprop" not in help_text()
    assert plan_with("optimizer=rmsprop").choices["optimizer"] == "rmsprop"
    assert plan_with("optimizer=rmsprop").run_id != plan_with("optimizer=adamw").run_id
    with pytest.raises(ConfigError, match="rmsprop"):
        compose(["optimizer=rmsprop"])
    with pytest.raises(ConfigError) as caught:
        compose(["optimizer=rmsprp"], own_options)
    assert str(caught.value.problems[0].fix) == "optimizer=rmsprop"


@pytest.mark.slow
def test_new_option_has_the_fields_and_limits_of_its_schema(plan_with, plugin) -> None:
    assert plan_with("optimizer=rmsprop", "optimizer.eps=1e-6").config.optimizer.eps == 1e-6
    for wrong, kind in (("beta2=1", "limit"), ("momentum=0.5", "other_options_key")):
        with pytest.raises(ConfigError) as error:
            plan_with("optimizer=rmsprop", f"optimizer.{wrong}")
        assert error.value.problems[0].id == kind


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("distributed=fsdp", "distributed.num_processes=2"), "it takes roots of whole matrices"),
        (("distributed=zero2", "distributed.num_processes=2"), "takes roots of whole matrices"),
        (("memory=optimizer_in_backward", "train.max_grad_norm=null"), "counts calls as steps"),
    ],
    ids=["parts", "pieces", "in_backward"],
)
def test_entry_names_incompatible_settings(overrides, why, plan_with, plugin) -> None:
    with pytest.raises(ConfigError, match=why):
        plan_with("optimizer=rmsprop", *overrides)


def test_optimizer_that_no_package_registers_is_rejected(plan_with) -> None:
    with pytest.raises(ConfigError) as error:
        plan_with("optimizer=rmsprop")
    assert error.value.problems[0].id == "unknown_option"


OWN_CODE = "custom"
"""Option that names the user's own code, which is in no table."""

TABLES = {
    "task": set(TASKS),
    "task's heads": set(HEADS),
    "optimizer": set(OPTIMIZER_REGISTRY),
    "schedule": set(SHAPES),
    "attention": {*ATTENTION, AUTO_ATTENTION},
    "engine": set(ENGINES),
    "tracker": set(TRACKERS),
    "peft": set(PEFTS),
    "offload": {*OFFLOADED, "nvme"},  # whose places are keys of its own
    "hardware": {*DEVICES, "auto", "cpu"},
}
"""Group -> the options its builders know; what follows an apostrophe names a second table."""


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_options_and_builders_are_the_same_set(table) -> None:
    group = table.partition("'")[0]
    assert {o for o in CATALOGUE.options[group] if o != OWN_CODE or o in TABLES[table]} == (
        TABLES[table]
    )


def test_presets_of_fields_reach_every_builder() -> None:
    """precision and memory: an option only sets fields, and the fields choose the builder."""
    memories = [compose([f"memory={o}"]).config for o in CATALOGUE.options["memory"]]
    assert {config.memory.checkpointing for config in memories} == set(CHECKPOINTING)


def test_every_kernel_of_sdpa_has_its_name_in_pytorch() -> None:
    assert {*PINNED, Backend.auto} == set(Backend) == set(EXPECTED)


MISTRAL = """\
# model=tiny_mistral -- small Mistral for byte tokens.
defaults:
  - /schema/model/llama@_here_
  - _self_
option: tiny_mistral
family: mistral
hidden_size: 64
num_hidden_layers: 3
num_attention_heads: 4
num_key_value_heads: 2
intermediate_size: 96
vocab_size: 320
max_position_embeddings: 128
tie_word_embeddings: false
"""


@pytest.fixture
def mistral_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of options with model=tiny_mistral, and the record of its family."""
    monkeypatch.setattr("eke.config.compose.check_files.LABELS", ("model",))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny_mistral.yaml").write_text(MISTRAL)
    wide = replace(
        LLAMA,
        name="mistral",
        counted_as="llama",
        smallest="tiny_mistral",
        config_class="MistralConfig",
        outside=lambda shape, task: 10**9,
    )
    monkeypatch.setitem(FAMILIES, "mistral", wide)
    return tmp_path


def test_new_family_is_planned_forecast_and_built_from_its_record(mistral_options) -> None:
    words = ["model=tiny_mistral", *SHORT, "hardware=cpu", "tracker=none", "batch.per_device=2"]
    plan = plan_for(compose(words, mistral_options), planning=False)
    model = build_model(plan, torch.device("cpu"))
    assert type(model).__name__ == "MistralForCausalLM"
    assert plan.size.num_parameters == sum(p.numel() for p in model.parameters())
    assert plan.size.flops_per_sample
    assert forecast(plan).components["activations"] > 10**9
    assert Work(plan).moved.expected > 0
    with pytest.raises(ConfigError) as caught:
        plan_for(compose([*words, "task=masked_lm"], mistral_options), planning=False)
    assert "task" in [problem.key for problem in caught.value.problems]


def test_new_family_reads_its_checkpoints_from_its_record(mistral_options, monkeypatch) -> None:
    raw = dict.fromkeys(MAIN, 64) | {"model_type": "new_type"}
    assert read_sizes(raw, "folder")[0] == "other"
    new = replace(FAMILIES["mistral"], checkpoints={"new_type": lambda reader: reader.main()})
    monkeypatch.setitem(FAMILIES, "mistral", new)
    assert read_sizes(raw, "folder") == ("mistral", dict.fromkeys(MAIN, 64))


Edits = dict[str, str | tuple[str, str]]
"""File -> content of a new file, or a line and the text in its place."""

SCALED_LORA: Edits = {
    "conf/peft/scaled_lora.yaml": """\
# peft=scaled_lora -- LoRA with a scale that does not depend on the rank.
# Does     adds scale x B A to each linear layer's weight
# Costs    as lora
# Saves    as lora
# Needs    as lora
# Source   this test
defaults:
  - /schema/peft/scaled_lora@_here_
  - _self_
option: scaled_lora
""",
    "src/eke/config/schema/techniques.py": (
        "PEFTS: dict[str, type] = {",
        """\
@dataclass
class ScaledLora(Lora):
    scale: float = field(default=2.0, metadata=Key.LEARNING | above(0))
    \"\"\"Factor of the update.\"\"\"


PEFTS: dict[str, type] = {"scaled_lora": ScaledLora, """,
    ),
    "src/eke/training/model/adapters.py": (
        '    "lora": _lora,\n',
        """\
    "lora": _lora,
    "scaled_lora": lambda plan, names, targets: _scaled(plan, _lora(plan, names, targets)),
}


def _scaled(plan: Plan, made: Any) -> Any:
    made.lora_alpha = cast(Any, plan.config.peft).scale * made.r
    return made


BUILDERS |= {
""",
    ),
    "src/eke/rules/techniques.py": (
        '    Technique(\n        "peft=lora",',
        """\
    Technique(
        "peft=scaled_lora", "gradients, states", "as peft=lora", Published(0.8, "as peft=lora"),
        numerics=Numerics.reduced,
    ),
    Technique(
        "peft=lora",""",
    ),
    "src/eke/rules/peft.py": (
        "RULES = dict(\n",
        """\
RULES = dict(
    scale_without_rslora=Rule(
        key="peft.use_rslora",
        when=lambda f: f.config.peft.option == "scaled_lora" and f.config.peft.use_rslora,
        why="the scale does not depend on the rank",
        fix=Fix("peft.use_rslora=false"),
        source="this test",
    ),
""",
    ),
}

SECOND_PART: Edits = {
    "conf/task/second_part.yaml": """\
# task=second_part -- predict the second part of each sample.
defaults:
  - /schema/task/second_part@_here_
  - _self_
option: second_part
""",
    "src/eke/config/schema/data.py": (
        "TASKS: dict[str, type] = {\n",
        """\
@dataclass
class SecondPart(Task):
    first_frac: float = field(default=0.5, metadata=Key.GROUP | between(0.01, 0.99))
    \"\"\"Share of the tokens that are not predicted.\"\"\"


TASKS: dict[str, type] = {
    "second_part": SecondPart,
""",
    ),
    "src/eke/training/batches/tasks.py": (
        "TASKS: dict[str, Callable[[TaskSamples, int, int], Sample]] = {\n",
        """\
def second_part(samples: TaskSamples, epoch: int, index: int) -> Sample:
    sample = causal_lm(samples, epoch, index)
    first_frac = getattr(samples.config.task, "first_frac")
    sample["labels"][: int(first_frac * len(sample["labels"]))] = IGNORED
    return sample


TASKS: dict[str, Callable[[TaskSamples, int, int], Sample]] = {
    "second_part": second_part,
""",
    ),
    "src/eke/training/model/model_checks.py": (
        "HEADS: dict[str, str] = {\n",
        'HEADS: dict[str, str] = {\n    "second_part": "AutoModelForCausalLM",\n',
    ),
    "src/eke/training/model/adapters.py": (
        "_TASK_TYPES: dict[str, str] = {\n",
        '_TASK_TYPES: dict[str, str] = {\n    "second_part": "CAUSAL_LM",\n',
    ),
    "src/eke/models/checkpoints/architecture.py": (
        "MAPPINGS = {\n",
        'MAPPINGS = {\n    "second_part": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",\n',
    ),
    "src/eke/models/families/llama.py": (
        '    tasks=("causal_lm", "sequence_classification"),\n',
        '    tasks=("causal_lm", "second_part", "sequence_classification"),\n',
    ),
}

USE = """\
import json, sys
from pathlib import Path

from peft.tuners.lora import LoraLayer
from trained import BRIEF, steps_of, train_job

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.estimate.memory.predict_memory import forecast
from eke.estimate.time.flops import Work
from eke.rules.techniques import TECHNIQUES
from eke.workflows.planning import plan_for

NEW = (*BRIEF, "model=tiny", "hardware=cpu", "task=second_part", "peft=scaled_lora",
       "task.first_frac=0.75", "peft.scale=3")
plan = plan_for(compose(NEW), planning=False)
assert plan.targets.per_token and plan.targets.is_causal and plan.config.peft.is_on
job = train_job(plan, Path(sys.argv[1]))
modules = list(job.bare_model.modules())
found = {
    "losses": [loss for loss, _ in steps_of(job).values()],
    "scales": sorted({m.scaling["default"] for m in modules if isinstance(m, LoraLayer)}),
    "warnings": [text for text in job.warnings if "effect" in text],
    "bytes": forecast(plan).components["activations"],
    "moved": Work(plan).moved.expected,
    "technique": TECHNIQUES["peft=scaled_lora"].slowdown,
}
for group, wrong in (("peft", "peft.use_rslora=true"), ("task", "model=tiny_bert")):
    try:
        plan_for(compose((*NEW, wrong)), planning=False)
    except ConfigError as error:
        found[group] = [problem.id for problem in error.problems]
print(json.dumps(found))
"""


def files_to_add(heading: str) -> list[str]:
    """Patterns of the files that a section of CONTRIBUTING.md lists for a new option."""
    section = (REPO / "CONTRIBUTING.md").read_text().partition(f"## {heading}\n")[2]
    table = section.partition("| --- | --- |\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    return [re.sub(r"<\w+>", "*", name) for cell in cells for name in re.findall(r"`(.+?)`", cell)]


@pytest.mark.parametrize(
    ("heading", "edits"),
    [("Add a technique", SCALED_LORA), ("Add a task", SECOND_PART)],
    ids=["technique", "task"],
)
def test_contributing_lists_the_files_of_a_new_option(heading, edits) -> None:
    listed = files_to_add(heading)
    assert len(listed) <= 8
    for pattern in listed:
        assert pattern.startswith("tests/") or any(fnmatch(file, pattern) for file in edits)
    for file in edits:
        assert any(fnmatch(file, pattern) for pattern in listed), file


@pytest.mark.slow
def test_a_new_technique_and_a_new_task_need_no_other_file(tmp_path) -> None:
    for part in ("src", "conf"):
        shutil.copytree(REPO / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file, edit in [*SCALED_LORA.items(), *SECOND_PART.items()]:
        path = tmp_path / file
        if isinstance(edit, tuple):
            assert path.read_text().count(edit[0]) == 1, file
            edit = path.read_text().replace(*edit)
        path.write_text(edit)
    paths = os.pathsep.join(map(str, (tmp_path / "src", REPO / "tests")))
    command = [sys.executable, "-c", USE, str(tmp_path / "run")]
    env = environment(tmp_path) | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["losses"]) == 4
    assert all(map(math.isfinite, found["losses"]))
    assert found["scales"] == [3]
    assert found["warnings"] == []
    assert found["bytes"] > 0
    assert found["moved"] > 0
    assert found["technique"] == 0.8
    assert found["peft"] == ["scale_without_rslora"]
    assert found["task"] == ["task_needs_other_model"]
