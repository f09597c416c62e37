"""Each fix is typed, and what the command then does is compared with what was meant."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from eke.common.errors import ConfigError, Problem
from eke.config.compose import Composed, compose, split_arguments
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.check_overrides import find_problems
from eke.config.foreign_names import Retired, find_retired, retired_names
from eke.config.schema.fields import find_limit_problems

CATALOGUE = make_catalogue()
MAX_ROUNDS = 4
"""Fixes of fixes: a key, the option that has it, what that option needs."""
ANYTHING = {
    "FILE_OR_FOLDER": "rows.jsonl", "FOLDER_OR_HUB_NAME": "owner/name", "FOLDER": "folder",
    "IMPORT_PATH": "net:Net",
}  # fmt: skip


def problems_of(*typed: str) -> list[Problem]:
    try:
        compose(split_arguments(typed).overrides)
    except ConfigError as error:
        return error.problems
    return []


def after_fixes(*typed: str) -> Composed:
    """What is composed once every fix is typed in place of what it corrects."""
    command = list(typed)
    for _ in range(MAX_ROUNDS):
        problems = problems_of(*command)
        if not problems:
            break
        assert all(str(p.fix) for p in problems), [p.render() for p in problems]
        fixes = [word for p in problems for word in p.fix.words]
        fixes = [re.sub("=(" + "|".join(ANYTHING) + ")$", lambda m: "=" + ANYTHING[m[1]], fix)
                 for fix in fixes]  # fmt: skip
        wrong = {p.key for p in problems} | {fix.partition("=")[0] for fix in fixes}
        kept = [t for t in command if t.lstrip("+-").partition("=")[0] not in wrong]
        command = list(dict.fromkeys([*kept, *fixes]))
    return compose(split_arguments(command).overrides)


def value(composed: Composed, path: str) -> Any:
    if path in composed.choices:
        return composed.choices[path]
    node: Any = composed.config
    for name in path.split("."):
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    return getattr(node, "name", node)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.parquet").touch()
    (tmp_path / "my_model").mkdir()


PRETRAINED = "model=pretrained model.name_or_path="
MEANT = {
    # checkpoints
    "model=meta-llama/Llama-3.2-1B": PRETRAINED + "meta-llama/Llama-3.2-1B",
    "model=bert-base-uncased": PRETRAINED + "bert-base-uncased",
    "model=gpt2-xl": PRETRAINED + "gpt2-xl",
    "model=./my_model": PRETRAINED + "./my_model",
    "model=my_model": PRETRAINED + "my_model",
    "model=out/model.safetensors": PRETRAINED + "out",
    "model_name_or_path=gpt2": PRETRAINED + "gpt2",
    "model.name=gpt2": PRETRAINED + "gpt2",
    "model=llama-7b": PRETRAINED + "llama-7b",
    "muon=true": "optimizer=muon",
    "seed:3": "seed=3",
    "model.attention=sdpa": "attention=sdpa",
    "model=tiny-bert": "model=tiny_bert",
    # files, folders and data sets
    "data=imdb": "data=hub data.name=imdb",
    "data=stanfordnlp/imdb": "data=hub data.name=stanfordnlp/imdb",
    "data=rows.jsonl": "data=jsonl data.path=rows.jsonl",
    "data=rows": "data=parquet data.path=rows",
    "data=notes/": "data=text data.path=notes/",
    "distributed=zero": "distributed=zero2",
    **{f"train_file=x{ending}": f"data={option} data.path=x{ending}"
       for ending, option in [(".jsonl", "jsonl"), (".json", "jsonl"), (".jsonl.gz", "jsonl"),
                              (".csv", "csv"), (".parquet", "parquet"), (".txt", "text")]},
    "validation_file=x.jsonl": "data=jsonl data.eval_path=x.jsonl",
    "data.path=foo.txt": "data=text data.path=foo.txt",
    "data.eval_path=x.jsonl": "data=jsonl data.eval_path=x.jsonl",
    "data.path=x.parquet data.prompt=q data.response=a":
        "data=parquet data.path=x.parquet data.prompt=q data.response=a",
    # several values at once
    "optimizer.betas=[0.9,0.95]": "optimizer.beta1=0.9 optimizer.beta2=0.95",
    "lora_target_modules=[k_proj,o_proj]": "peft=lora peft.target_modules=[k_proj,o_proj]",
    "seed=[7]": "seed=7",
    # keys of other options: the plainest that has them
    "peft.r=8": "peft=lora peft.r=8",
    "model.num_local_experts=8": "model=tiny_moe model.num_local_experts=8",
    # a short trial
    **dict.fromkeys(["debug=true", "debug", "fast_dev_run=true", "experiment=debug"],
                    "experiment=debug train.steps=2 data.num_samples=8"),
    "fast_dev_run=5": "experiment=debug train.steps=5",
    "limit_train_batches=10": "train.steps=10",
    # limits and broken syntax
    "train.grad_clip=-1": "train.max_grad_norm=None",
    "gradient_clip_val=0": "train.max_grad_norm=None",
    "bnb_4bit_compute_dtype=float16": "precision=fp16",
    "optimizer.lr=5e-4;": "optimizer.lr=0.0005",
    "peft=lora peft.target_modules=[q_proj,v_proj": "peft.target_modules=[q_proj,v_proj]",
    "precision=bf16)": "precision=bf16",
    "tracker.group=\"a": "tracker.group=a",
    "tracker.group=it's": "tracker.group=it's",
}  # fmt: skip


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("typed", "meant"), MEANT.items(), ids=list(MEANT))
def test_fix_has_the_intended_effect(typed: str, meant: str) -> None:
    composed = after_fixes(*typed.split(" "))
    for override in meant.split(" "):
        path, _, wanted = override.partition("=")
        got = value(composed, path)
        assert str(got).replace("'", "").replace(", ", ",") == wanted.replace("'", "")


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("data=imdb,squad", "-m data=hub data.name=imdb,squad"),
        ("logging_steps=10,20", "-m train.log_every=10,20"),
        ("precision=fp32,bf17", "-m precision=fp32,bf16"),
        ("precision=fp32,foo", ""),
        ("data=text,imdb", ""),
    ],
)
def test_sweep_over_foreign_names_has_a_fix(typed: str, fix: str) -> None:
    assert str(problems_of(typed)[-1].fix) == ("python train.py " if fix else "") + fix


def test_zero_that_disables_a_limit_becomes_null() -> None:
    refused = list(find_limit_problems(compose(["train.max_grad_norm=0"]).config))
    assert [str(p.fix) for p in refused] == ["train.max_grad_norm=null"]


@pytest.mark.parametrize("name", ["FP16", "Learning-Rate", "compile=NVFuser"])
def test_case_and_dashes_do_not_matter(name: str) -> None:
    assert find_retired(name) is not None


def test_value_with_spaces_stays_one_override() -> None:
    row = find_retired("output_dir")
    assert row is not None
    assert row.overrides("a b") == ("paths.runs=a b",)


NOTHING_LIKE_IT = [
    "model=distilbert", "precision=foo", "hardware=a10", "hardware=l40", "hardware=a100", "tags=a",
    "zzqqxx=1", "ckpt_path=runs/abc", "eval_accumulation_steps=4", "push_to_hub=true",
    "hub_model_id=a/b", "load_best_model_at_end=true", "early_stopping_threshold=0.1",
    "assistant_only_loss=true",
    "overfit_batches=1", "limit_train_batches=0.1", "optimizer.betas=0.9", "train_file=x.tsv",
    "model=tiny_bert model.rope_theta=100", "dropout=0.1", "path=x", "name=x", "~train",
    "~trainer.extra.x", "save_strategy=epoch", "eval=1", "data_seed=3", "tensor_parallel=2",
    "tracker=[wandb,mlflow]", "load_in_8bit=true",
]  # fmt: skip


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("typed", NOTHING_LIKE_IT)
def test_unknown_name_without_equivalent_has_no_fix(typed: str) -> None:
    problems = problems_of(*typed.split(" "))
    assert [str(p.fix) for p in problems] == [""]
    assert problems[0].why


def test_deleted_group_or_key_becomes_its_default() -> None:
    for key in [*CATALOGUE.options, *CATALOGUE.keys]:
        (problem,) = find_problems(f"~{key}", CATALOGUE)
        (fix,) = problem.fix.words
        assert not find_problems(fix, CATALOGUE), fix
        if default := CATALOGUE.defaults.get(key.removesuffix(".option")):
            assert fix == f"{key.removesuffix('.option')}={default}"
    fixes = [str(p.fix) for each in ("batch.target", "seed") for p in problems_of(f"~{each}")]
    assert fixes == ["batch.target=null", "seed=0"]


ROWS = ["sweep.rows={seed:1},{seed:2}", "sweep.rows=[{seed:1},{seed:2}]"]


@pytest.mark.parametrize("typed", ["~hydra/launcher", "~hydra.verbose", "~train", *ROWS])
def test_fix_never_repeats_the_rejected_override(typed: str) -> None:
    for multirun in (False, True):
        (problem,) = find_problems(typed, CATALOGUE, multirun)
        assert not problem.fix


def test_unknown_flag_lists_the_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments(["--foo"])
    (problem,) = caught.value.problems
    assert (problem.id, str(problem.fix)) == ("unknown_flag", "")
    assert "--config-dir" in problem.why


BROKEN = ["seed=[1,2", "model={a", "x={", "a=[1,", "optimizer.lr=1e-3;", "precision=(",
          "data.seq_len='1", "optimizer={lr:0.1"]  # fmt: skip


@pytest.mark.parametrize("typed", BROKEN)
def test_syntax_error_hides_parser_messages(typed: str) -> None:
    (problem,) = problems_of(typed)
    parser = r"viable|mismatched|extraneous|token recognition|expecting|line \d"
    assert not re.search(parser, problem.render())


# --- every row of the tables ---------------------------------------------------------------------

SAMPLES: dict[type, str] = {bool: "true", int: "4", float: "0.5", str: "some_name"}


def sample(row: Retired) -> str:
    """A value that the key which a row proposes takes."""
    override = next((o for o in reversed(row.fix.split()) if "{" in o), "")
    key = override.partition("=")[0]
    if row.fix in ("{data}", "{eval_data}"):
        return "rows.jsonl"
    if "{1}" in row.fix:
        return "[0.8,0.9]"
    if key == "distributed" and "zero{" in override:
        return "2"
    if key in CATALOGUE.options:
        return list(CATALOGUE.options[key])[-1]
    if key not in CATALOGUE.keys:
        return "true"
    field = CATALOGUE.keys[key]
    members = list(getattr(field.kind, "__members__", {}))
    return members[-1] if members else SAMPLES.get(field.kind, "q_proj")


def typed_words(row: Retired) -> list[tuple[str, tuple[str, ...]]]:
    """Each value that a row knows, as it is typed; and the overrides that are its fix."""
    if "=" in row.name:
        return [(row.name, row.overrides(row.name.partition("=")[2]))]
    values = dict.fromkeys([*row.by_value, sample(row)])
    return [(f"{row.name}={v}", row.overrides(v)) for v in values]


def test_retired_names_are_not_current_names() -> None:
    for name in retired_names():
        group, _, option = name.partition("=")
        alive = option in CATALOGUE.options[group] if option else name in CATALOGUE.keys
        assert not alive, f"{name} exists now: remove its row"
        assert option or name not in CATALOGUE.options


def test_every_retired_name_has_one_problem_and_a_fix() -> None:
    for row in retired_names().values():
        for typed, wanted in typed_words(row):
            (problem, *others) = find_problems(typed, CATALOGUE)
            assert not others, typed
            assert problem.id == "foreign_name", typed
            assert list(problem.fix.words) == list(wanted) or len(wanted) == 1, typed
            assert all(not find_problems(o, CATALOGUE) for o in problem.fix.words), typed


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_every_fix_composes_and_sets_its_keys() -> None:
    fixes = {str(p.fix) for row in retired_names().values() for typed, _ in typed_words(row)
             for p in find_problems(typed, CATALOGUE) if p.fix}  # fmt: skip
    for fix in sorted(fixes):
        composed = after_fixes(*shlex.split(fix))
        for override in shlex.split(fix):
            path, _, wanted = override.partition("=")
            if not wanted.isupper() and wanted != "auto":  # which is resolved
                got = str(value(composed, path)).replace("'", "").replace(", ", ",").lower()
                assert got in (wanted.lower().replace("null", "none"), f"{wanted}.0"), fix


def test_trainer_names_are_training_arguments() -> None:
    import dataclasses

    from transformers import TrainingArguments

    removed = {
        "per_gpu_train_batch_size", "warmup_ratio", "evaluation_strategy", "overwrite_output_dir",
        "logging_dir", "sharded_ddp", "no_cuda", "group_by_length", "use_ipex", "jit_mode_eval",
        "half_precision_backend", "fp16_backend", "fp16_opt_level", "torchdynamo", "no_tf32",
        "save_safetensors",
    }  # fmt: skip
    there = {field.name for field in dataclasses.fields(TrainingArguments)}
    trainers = {row.name for row in retired_names().values() if "Trainer" in row.owner}
    assert trainers - there - removed == set()
