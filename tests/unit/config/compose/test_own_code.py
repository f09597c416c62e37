"""The user's own code by import path: overrides, option files, their mistakes and their fixes."""

import json
from pathlib import Path

import pytest

from eke.common.errors import ConfigError, Problem
from eke.config.compose import compose, split_arguments
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.composer import Composed
from eke.config.compose.help import help_text
from eke.config.parts import own_parts
from eke.config.schema import CallbackEntry, Config, MetricEntry, OnError
from eke.config.schema.codec import make_converter
from eke.config.sweep.definition import expand
from eke.plan.identity import run_id

MODEL = ("model=custom", "model.target=chars.model.Decoder")


def problems_of(*typed: str, folder: Path | None = None) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(list(typed), folder)
    return caught.value.problems


def fixes_of(*typed: str) -> list[tuple[str, ...]]:
    return [problem.fix.words for problem in problems_of(*typed)]


def parts_of(*typed: str) -> dict[str, tuple[str, object]]:
    return {part.key: (part.target, part.args) for part in own_parts(compose(list(typed)).config)}


def identity(composed: Composed) -> str:
    return run_id(make_converter().unstructure(composed.config), {}, "data")


# --- overrides ----------------------------------------------------------------------------------


def test_run_without_own_code_has_no_parts() -> None:
    assert own_parts(compose([]).config) == ()


def test_parts_are_listed_in_a_fixed_order_with_their_arguments() -> None:
    typed = [
        "callbacks.texts.target=chars.watch.Texts", "callbacks.texts.args.length=20",
        "metrics.b.target=chars.metrics:Bits", "metrics.a.target=net.Acc",
        "loss=custom", "loss.target=mine.focal", "loss.per=mine.count",
        "schedule=custom", "schedule.target=mine.warm", "schedule.args.power=0.5",
        "optimizer=custom", "optimizer.target=lion_pytorch.Lion", "optimizer.args.betas=[0.9,0.98]",
        "data=custom", "data.target=chars.data.Rows", "data.collate=chars.data.join",
        "data.args.root=x", "data.eval_args.root=y", *MODEL, "model.args.config.hidden=64",
    ]  # fmt: skip
    found = parts_of(*typed)
    assert found == {
        "model": ("chars.model:Decoder", {"config": {"hidden": 64}}),
        "data": ("chars.data:Rows", {"root": "x"}),
        "optimizer": ("lion_pytorch:Lion", {"betas": [0.9, 0.98]}),
        "schedule": ("mine:warm", {"power": 0.5}),
        "loss": ("mine:focal", {}),
        "data.collate": ("chars.data:join", {}),
        "loss.per": ("mine:count", {}),
        "metrics.a": ("net:Acc", {}),
        "metrics.b": ("chars.metrics:Bits", {}),
        "callbacks.texts": ("chars.watch:Texts", {"length": 20}),
    }
    assert list(found) == list(parts_of(*reversed(typed)))


def test_key_of_the_batch_as_divisor_is_no_import_path() -> None:
    assert parts_of("loss.per=targets") == {}
    assert compose(["loss.per=targets"]).config.loss.per == "targets"


def test_arguments_keep_their_types_and_nest() -> None:
    args = [
        "a=1",
        "b=1.5",
        "c=true",
        "d=null",
        "e=text",
        "f='1'",
        "g=[1,x]",
        "h={i:{j:2}}",
        "h.i.k=1e-3",
        "l=2e-3",
    ]
    model = compose([*MODEL, *(f"model.args.{each}" for each in args)]).config.model
    assert model.args == {
        "a": 1, "b": 1.5, "c": True, "d": None, "e": "text", "f": "1", "g": [1, "x"],
        "h": {"i": {"j": 2, "k": 0.001}}, "l": 0.002,
    }  # fmt: skip


def test_inputs_and_layers_are_set_by_name() -> None:
    model = compose([*MODEL, "model.inputs.idx=input_ids", "model.layers=[Block]"]).config.model
    assert (model.inputs, model.layers) == ({"idx": "input_ids"}, ["Block"])


def test_entries_are_typed() -> None:
    config = compose(
        ["metrics.m.target=net.M", "metrics.m.inputs.preds=logits", "callbacks.c.target=net.C",
         "callbacks.c.on_error=fail", "+callbacks.c.args.n=1"]
    ).config  # fmt: skip
    assert type(config) is Config
    assert config.metrics == {"m": MetricEntry("net:M", {}, {"preds": "logits"})}
    assert config.callbacks == {"c": CallbackEntry("net:C", {"n": 1}, OnError.fail)}


def test_configuration_with_own_code_survives_json() -> None:
    config = compose(
        [*MODEL, "model.args.x={y:[1]}", "metrics.m.target=net.M", "callbacks.c.target=net.C"]
    ).config
    plain = json.loads(json.dumps(make_converter().unstructure(config)))
    assert make_converter().structure(plain, Config) == config


def test_sweep_over_arguments_has_a_run_for_each_value() -> None:
    typed = [*MODEL, "model.args.width=128,256", "metrics.m.target=net.M,net.N"]
    runs = [each.composed.config for each in expand(typed).cells]
    widths = [(each.model.args, each.metrics) for each in runs]
    assert [(args["width"], metrics["m"].target) for args, metrics in widths] == [
        (128, "net:M"), (128, "net:N"), (256, "net:M"), (256, "net:N"),
    ]  # fmt: skip


# --- mistakes -----------------------------------------------------------------------------------

FIXES = [
    ("model.target=net.GPT", ["model=custom", "model.target=net.GPT"]),
    ("model._target_=net.GPT", ["model=custom", "model.target=net.GPT"]),
    ("model.args.x=1", ["model=custom", "model.args.x=1"]),
    ("model.args.x.y=1", ["model=custom", "model.args.x.y=1"]),
    ("data.target=net.Rows", ["data=custom", "data.target=net.Rows"]),
    ("data.args.root=x", ["data=custom", "data.args.root=x"]),
    ("optimizer.target=net.Opt", ["optimizer=custom", "optimizer.target=net.Opt"]),
    ("schedule.target=net.f", ["schedule=custom", "schedule.target=net.f"]),
    ("loss.target=net.f", ["loss=custom", "loss.target=net.f"]),
    ("loss.args.gamma=2", ["loss=custom", "loss.args.gamma=2"]),
    ("model=net.GPT", ["model=custom", "model.target=net.GPT"]),
    ("data=net:Rows", ["data=custom", "data.target=net:Rows"]),
    ("loss=net.focal", ["loss=custom", "loss.target=net.focal"]),
    ("metrics=net.Acc", ["metrics.acc.target=net.Acc"]),
    ("metrics.x=net.Acc", ["metrics.x.target=net.Acc"]),
    ("metrics.x._target_=net.Acc", ["metrics.x.target=net.Acc"]),
    ("metrics.x.args.n=1", ["metrics.x.target=IMPORT_PATH"]),
    ("model=custom model.target=net.GPT model.width=3", ["model.args.width=3"]),
    ("model=custom model.target=net.GPT model.hidden_size=3", ["model.args.hidden_size=3"]),
    ("model=custom model.target=net.GPT model.rope_theta=3", ["model.args.rope_theta=3"]),
    ("model=custom model._target_=net.GPT", ["model.target=net.GPT"]),
    ("data=custom data.target=net.Rows data.path=x", ["data.args.path=x"]),
    ("optimizer=custom optimizer.target=net.O optimizer.beta1=0.5", ["optimizer.args.beta1=0.5"]),
    ("metrics.x.target=net.Acc metrics.x.n=3", ["metrics.x.args.n=3"]),
    ("callbacks.x.target=net.C callbacks.x.on_error=wran", ["callbacks.x.on_error=warn"]),
    ("model=custom model.target=./net.py:GPT", ["model.target=net.GPT"]),
    ("model=custom model.target=src/chars/model.py:GPT", ["model.target=chars.model.GPT"]),
    ("model=custom", ["model.target=IMPORT_PATH"]),
    ("model=custom model.target=net.GPT model.args.x=nan", ["model.args.x='nan'"]),
    ("model=custom model.target=net.GPT model.args.f=f(2)", ["model.args.f='f(2)'"]),
]


@pytest.mark.parametrize(("typed", "fix"), FIXES, ids=[typed for typed, _ in FIXES])
def test_mistake_has_one_problem_with_its_fix(typed: str, fix: list[str]) -> None:
    assert fixes_of(*typed.split()) == [tuple(fix)]


@pytest.mark.parametrize(("typed", "fix"), FIXES, ids=[typed for typed, _ in FIXES])
def test_fix_composes(typed: str, fix: list[str]) -> None:
    words = [word.replace("IMPORT_PATH", "net.Net") for word in fix]
    key = problems_of(*typed.split())[0].key
    kept = [word for word in typed.split() if word.partition("=")[0] != key]
    keys = {word.partition("=")[0] for word in words}
    command = [*(word for word in kept if word.partition("=")[0] not in keys), *words]
    needed = [f"{g}.target=net.Net" for g in ("model", "data", "loss") if f"{g}=custom" in command]
    given = {word.partition("=")[0] for word in command}
    command += [word for word in needed if word.partition("=")[0] not in given]
    assert compose(command).config


@pytest.mark.parametrize("group", ["model", "data", "optimizer", "schedule", "loss"])
@pytest.mark.parametrize(
    ("target", "written"),
    [
        ("net", "net.NAME"),
        ("./net.py", "net.NAME"),
        ("../pkg/net.py", "pkg.net.NAME"),
        ("src/chars/model.py", "chars.model.NAME"),
        ("lambda x: x", "NAME.FUNCTION"),
        ("lambda x: x.mean()", "NAME.FUNCTION"),
    ],
)
def test_text_that_is_no_import_path_is_refused(group: str, target: str, written: str) -> None:
    (problem,) = problems_of(f"{group}=custom", f"{group}.target={target}")
    assert (problem.key, problem.id, problem.fix.words) == (f"{group}.target", "own_code", ())
    assert f"{group}.target={written}" in problem.fix.remark


@pytest.mark.parametrize("name", ["_args_", "_target_", "_partial_", "enc._target_"])
def test_keys_of_hydra_are_no_arguments(name: str) -> None:
    (problem,) = problems_of(*MODEL, f"model.args.{name}=1")
    assert (problem.key, problem.id) == (f"model.args.{name}", "own_code")


def test_argument_with_a_number_as_name_is_refused() -> None:
    (problem,) = problems_of(*MODEL, "model.args.x={1:a}")
    assert problem.key == "model.args.x.1"


def test_unknown_argument_in_a_sweep_is_fixed_for_all_values() -> None:
    with pytest.raises(ConfigError) as caught:
        expand([*MODEL, "model.width=3,4"])
    assert [p.fix.words for p in caught.value.problems] == [("model.args.width=3,4",)]


# --- option files -------------------------------------------------------------------------------

NET = """
_target_: chars.model.Decoder
_convert_: all
width: 128
rate: 1e-3
config: {hidden: 64}
"""


def save(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        group, _, option = name.partition("__")
        (folder / group).mkdir(exist_ok=True)
        (folder / group / f"{option}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        NET,
        "defaults: [custom, _self_]\ntarget: chars.model:Decoder\n"
        "args: {width: 128, rate: 0.001, config: {hidden: 64}}\noption: net\n",
        "defaults: [/schema/model/custom@_here_, _self_]\nfamily: custom\n"
        "target: chars.model.Decoder\nargs: {width: 128, rate: 0.001, config: {hidden: 64}}\n",
    ],
    ids=["hydra", "eke", "schema"],
)
def test_option_file_and_overrides_are_one_run(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, model__net=text)
    args = ("model.args.width=128", "model.args.rate=0.001", "model.args.config.hidden=64")
    typed = compose([*MODEL, *args])
    from_file = compose(["model=net"], folder)
    assert own_parts(from_file.config) == own_parts(typed.config)
    assert identity(from_file) == identity(typed)
    assert identity(compose(["model=net", "model.args.width=3"], folder)) != identity(typed)


def test_dot_and_colon_are_one_run() -> None:
    one, other = (compose(["model=custom", f"model.target=a.b{sign}C"]) for sign in ".:")
    assert one.config == other.config


PARTS = {
    "data": ("data.target=p.T", "data.args.n=1"),
    "optimizer": ("optimizer.target=p.T", "optimizer.args.n=1", "optimizer.lr=0.3"),
    "schedule": ("schedule.target=p.T", "schedule.args.n=1"),
    "loss": ("loss.target=p.T", "loss.args.n=1"),
}


@pytest.mark.parametrize("group", PARTS)
def test_target_in_a_file_of_each_group(tmp_path: Path, group: str) -> None:
    partial = "" if group == "data" else "_partial_: true\n"
    lr = "lr: 0.3\n" if group == "optimizer" else ""
    folder = save(tmp_path, **{f"{group}__mine": f"_target_: p.T\nn: 1\n{partial}{lr}"})
    typed = compose([f"{group}=custom", *PARTS[group]]).config
    assert compose([f"{group}=mine"], folder).config == typed


def test_files_of_metrics_and_callbacks_have_entries(tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        metrics__mine="bits: {_target_: net.Bits, n: 3, _partial_: true}\n"
        "acc:\n  target: net.Acc\n  inputs: {preds: logits}\n",
        callbacks__mine="texts: {_target_: net.Texts, length: 20}\n",
    )
    found = compose(["metrics=mine", "callbacks=mine", "metrics.bits.args.n=4"], folder).config
    typed = compose(
        ["metrics.bits.target=net.Bits", "metrics.bits.args.n=4", "metrics.acc.target=net.Acc",
         "metrics.acc.inputs.preds=logits", "callbacks.texts.target=net.Texts",
         "callbacks.texts.args.length=20"]
    ).config  # fmt: skip
    assert found == typed


def test_experiment_changes_arguments_of_an_option_file(tmp_path: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /model: net\n"
    text += "model: {args: {width: 7}}\nmetrics: {m: {target: net.M}}\n"
    folder = save(tmp_path, model__net=NET, experiment__e=text)
    config = compose(["experiment=e"], folder).config
    assert config.model.args["width"] == 7
    assert config.metrics == {"m": MetricEntry("net:M")}
    (problem,) = problems_of("experiment=e", "model.width=3", folder=folder)
    assert problem.fix.words == ("model.args.width=3",)


def test_option_file_extends_another(tmp_path: Path) -> None:
    folder = save(tmp_path, model__net=NET, model__wide="defaults: [net, _self_]\nargs: {width: 9}")
    assert compose(["model=wide"], folder).config.model.args["width"] == 9
    save(folder, model__wrong="defaults: [net, _self_]\nwidth: 9\n")
    (problem,) = problems_of("model=wrong", folder=folder)
    assert problem.key == f"{folder}/model/wrong.yaml:2"
    assert "args: {width:" in problem.fix.remark


@pytest.mark.parametrize(
    ("group", "line", "written"),
    [
        ("model", "_args_: [1]", ""),
        ("model", "_recursive_: false", "_recursive_: true"),
        ("model", "_convert_: none", "_convert_: all"),
        ("model", "_partial_: true", "_partial_: false"),
        ("loss", "_partial_: false", "_partial_: true"),
    ],
)
def test_other_keys_of_hydra_are_refused(
    tmp_path: Path, group: str, line: str, written: str
) -> None:
    folder = save(tmp_path, **{f"{group}__net": f"_target_: net.GPT\n{line}\n"})
    (problem,) = problems_of(f"{group}=net", folder=folder)
    assert (problem.key, problem.id) == (f"{folder}/{group}/net.yaml:2", "wrong_file")
    assert written in problem.fix.remark
    assert compose([], folder).config  # the file is not used


def test_nested_target_in_a_file_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, model__net="_target_: net.GPT\nenc: {_target_: net.Enc}\n")
    (problem,) = problems_of("model=net", folder=folder)
    assert problem.key == "model.args.enc._target_"


def test_file_with_target_and_without_schema_is_told_to_use_the_schema(tmp_path: Path) -> None:
    folder = save(tmp_path, model__net="target: net.GPT\n")
    (problem,) = problems_of("model=net", folder=folder)
    assert "/schema/model/custom@_here_" in problem.fix.remark


# --- help and identity --------------------------------------------------------------------------


def test_help_lists_keys_of_own_code(tmp_path: Path) -> None:
    page = help_text(topic="model=custom").split()
    assert {"model.target", "model.args", "model.inputs", "model.layers"} <= set(page)
    folder = save(tmp_path, model__net=NET)
    assert make_catalogue(folder).schema_class("model", "net").__name__ == "CustomModel"


def test_each_part_changes_the_run_id() -> None:
    every = [
        [], ["metrics.m.target=net.M"], ["metrics.n.target=net.M"], ["callbacks.m.target=net.M"],
        ["metrics.m.target=net.M", "metrics.m.args.x=1"], ["loss.per=y"],
        ["loss.couples_batch=true"], ["loss=custom", "loss.target=net.f"],
        ["metrics.m.target=net.M", "metrics.m.inputs.x=y"],
    ]  # fmt: skip
    ids = {identity(compose(typed)) for typed in every}
    assert len(ids) == len(every)


def test_unused_groups_are_not_in_the_identity() -> None:
    plain = make_converter().unstructure(compose([]).config)
    older = {key: plain[key] for key in plain if key not in ("loss", "metrics", "callbacks")}
    assert run_id(plain, {}, "data") == run_id(older, {}, "data")


def test_split_command_line_accepts_own_code() -> None:
    typed = [*MODEL, "metrics.m.target=net.M"]
    assert list(split_arguments(typed).overrides) == typed
