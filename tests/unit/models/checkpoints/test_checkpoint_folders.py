"""`model=pretrained` before anything is loaded: sizes, identity, and every folder that is wrong."""

import ast
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import transformers
from checkpoints import FAMILIES, TASK_OF, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from support import environment, last_wins
from unit.models.sizes.test_measure import names_and_shapes

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.config.schema.codec import make_converter
from eke.models.checkpoints import resolve_model
from eke.models.checkpoints.architecture import asked_router_loss, router_loss
from eke.models.checkpoints.locate import LocalCheckpoint, resolve_tokenizer
from eke.models.checkpoints.resolve import weight_files
from eke.models.families import FAMILIES as RECORDS
from eke.models.sizes import model_size, state_bytes, structure
from eke.training.model.model_checks import HEADS
from eke.workflows.planning import plan_for

SHORT = ("data=synthetic", "data.seq_len=16", "data.max_token=300", "hardware=cpu", "tracker=none")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Family -> a checkpoint that no test changes."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture
def folder(saved, tmp_path):
    """A Llama checkpoint that a test may spoil."""
    return shutil.copytree(saved["llama"], tmp_path / "mine")


def resolved(path, *overrides, planning=True):
    typed = ["model=pretrained", f"model.name_or_path='{path}'", *overrides]
    composed = compose(typed)
    return resolve_model(composed.config, composed.overrides, planning)


def plan_of(path, *overrides):
    typed = last_wins("model=pretrained", f"model.name_or_path='{path}'", *SHORT, *overrides)
    return plan_for(compose(typed), planning=True)


def refused(path, *overrides, planning=True):
    with pytest.raises(ConfigError) as caught:
        resolved(path, *overrides, planning=planning)
    (problem,) = caught.value.problems
    return problem


def edit(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    content |= {key: value for key, value in changes.items() if value is not None}
    for key in [key for key, value in changes.items() if value is None]:
        content.pop(key, None)
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_sizes_match_the_loaded_model(saved, family):
    task = RECORDS[{"mistral": "llama"}.get(family, family)].tasks[0]
    config = resolved(saved[family], f"task={task}")
    loaded = getattr(transformers, HEADS[task]).from_pretrained(saved[family])
    assert config.model.family != "other"
    planned = [(sorted(w.names), w.shape) for w in structure(config).weights]
    assert sorted(planned) == names_and_shapes(loaded)
    assert config.model.vocab_size == loaded.config.vocab_size
    assert config.model.max_position_embeddings == getattr(
        loaded.config, "max_position_embeddings", None
    )


MINIMAL = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config", "mixtral": "MixtralConfig", "bert": "BertConfig",
    "gpt2": "GPT2Config", "t5": "T5Config",
}  # fmt: skip


@pytest.mark.parametrize("kind", MINIMAL)
def test_missing_config_values_use_transformers_defaults(kind, tmp_path):
    from eke.models.checkpoints.architecture import read_sizes

    own = getattr(transformers, MINIMAL[kind])()
    main = {"vocab_size": 320, own.attribute_map.get("hidden_size", "hidden_size"): 64}
    main |= {own.attribute_map.get("num_hidden_layers", "num_hidden_layers"): 2}
    main |= {own.attribute_map.get("num_attention_heads", "num_attention_heads"): 32}
    main |= {"d_ff": 96} if kind == "t5" else {"intermediate_size": 96}
    main.pop("intermediate_size") if kind == "gpt2" else None
    _, sizes = read_sizes({"model_type": kind, **main}, "folder")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **main}))
    real = transformers.AutoConfig.from_pretrained(tmp_path)
    names = {"head_dim": "d_kv"} if kind == "t5" else {}
    for key, value in sizes.items():
        if key in ("intermediate_size", "gated", "num_decoder_layers"):
            continue
        other = getattr(real, names.get(key, key), None)
        if key == "head_dim" and value is None:
            value = other and 64 // 32  # derived, by some classes already in the configuration
        if key == "num_key_value_heads" and value is None:
            value = 32  # as many as heads
        assert value == other, key


def test_architecture_without_formula_is_counted_from_tensors(tmp_path):
    config = transformers.PhiConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = transformers.PhiForCausalLM(config)
    model.save_pretrained(tmp_path)
    size = model_size(found := resolved(tmp_path, "data=synthetic", "data.seq_len=16"))
    assert found.model.family == "other"
    assert size.num_parameters == sum(p.numel() for p in model.parameters())
    matmul = size.num_parameters - 320 * 32
    # Biases and norms count, too: 6 N D is an estimate of a few per mille here.
    assert size.flops_per_sample == pytest.approx(6 * matmul * 16 + 12 * 2 * 32 * 16 * 8, rel=0.03)
    assert state_bytes(found).total == 16 * size.num_parameters
    assert str(refused(tmp_path, "task=masked_lm").fix) == "task=causal_lm"


def test_unknown_expert_architecture_has_no_flops(folder):
    edit(folder, model_type="olmoe", num_experts=4)
    plan = plan_of(folder)
    assert plan.size.flops_per_sample is None
    from eke.plan.planner import plan_to_plain, render_plan

    assert "unknown for olmoe" in render_plan(plan)
    assert json.dumps(plan_to_plain(plan))


def test_untied_t5_keeps_its_projection(saved, tmp_path):
    path = shutil.copytree(saved["t5"], tmp_path / "v1_1")
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit(path, tie_word_embeddings=False)
    config = resolved(path, "task=seq2seq_lm")
    model = transformers.T5ForConditionalGeneration.from_pretrained(path)
    assert model_size(config).num_parameters == sum(p.numel() for p in model.parameters())


def test_identity_of_a_checkpoint_is_its_content(folder, tmp_path):
    before = plan_of(folder).run_id
    assert plan_of(folder, "model.dropout=0.1").run_id != before
    (folder / "tokenizer.json").write_text("{}")
    moved = shutil.copytree(folder, tmp_path / "else where" / "é")
    os.utime(moved / "model.safetensors", ns=(1, 1))
    by_relative_path = plan_of(os.path.relpath(moved))
    assert by_relative_path.run_id == before
    assert by_relative_path.config.model.name_or_path == str(moved)
    edit(folder, rms_norm_eps=1e-3)
    assert plan_of(folder).run_id != before
    save_checkpoint(moved, "llama", seed=1)
    assert plan_of(moved).run_id != before


def test_plan_round_trips_through_json(saved):
    from dataclasses import replace

    from eke.plan.planner import Plan

    plan = plan_of(saved["mixtral"])
    plain = json.loads(json.dumps(make_converter().unstructure(plan)))
    read = make_converter().structure(plain, Plan)
    assert replace(read, decisions=()) == replace(plan, decisions=())
    assert make_converter().unstructure(read) == plain


@pytest.mark.parametrize(
    ("flag", "typed", "wanted"),
    [(True, "auto", 0.02), (False, "auto", None), (True, "off", None), (False, "0.5", 0.5)],
)
def test_router_loss_is_trained_only_on_request(flag, typed, wanted, tmp_path):
    path = save_checkpoint(
        tmp_path / "moe", "mixtral", output_router_logits=flag, router_aux_loss_coef=0.02
    )
    plan = plan_of(path, f"task.router_loss={typed}")
    assert plan.config.model.router_loss == (0.02 if flag else None)
    assert router_loss(plan.config) == wanted
    said = {decision.key: decision for decision in plan.decisions}.get("task.router_loss")
    assert (said and float(said.value)) == wanted
    assert said is None or "batch.per_device" in said.reason


@pytest.mark.parametrize(
    ("kind", "task", "settings"),
    [
        ("nllb-moe", "seq2seq_lm", {"router_aux_loss_coef": 0.1}),
        ("mixtral", "causal_lm", {"router_aux_loss_coef": None}),
    ],
)
def test_untrainable_router_loss_is_rejected(kind, task, settings) -> None:
    raw = {"model_type": kind, "output_router_logits": True, **settings}
    typed = [*SHORT, f"task={task}"]
    with pytest.raises(ConfigError) as caught:
        asked_router_loss(compose(typed).config, raw)
    (problem,) = caught.value.problems
    asked_router_loss(compose([*typed, *problem.fix.overrides]).config, raw)


def test_dbrx_router_coefficient_is_read_from_its_subconfig() -> None:
    raw = {"model_type": "dbrx", "output_router_logits": True}
    part = {"ffn_config": {"moe_loss_weight": 0.05}}
    assert asked_router_loss(compose([*SHORT]).config, raw | part) == 0.05


def test_checkpoint_sizes_cannot_be_overridden(folder):
    problem = refused(folder, "model.hidden_size=64")
    assert (problem.key, problem.value) == ("model.hidden_size", "64")
    assert "read from the checkpoint" in problem.why
    assert refused(folder, "model.tie_word_embeddings=true").key == "model.tie_word_embeddings"


def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def shard(folder, *, drop):
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    names = sorted(folder.glob("model-*.safetensors"))
    assert len(names) > 1
    if drop:
        names[1].unlink()


def inside(folder, name):
    moved = folder / name
    moved.mkdir(parents=True)
    for file in folder.glob("*.*"):
        if file.is_file():
            shutil.move(file, moved)


def run_folder(folder):
    for step in ("step-00000002", "step-00000010"):
        shutil.copytree(folder, folder.parent / "run" / "checkpoints" / step)
    shutil.rmtree(folder)
    shutil.move(folder.parent / "run", folder)
    (folder / "plan.json").write_text("{}")


def adapter(folder):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lfs(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


BROKEN = {
    "no config.json": (lambda f: (f / "config.json").unlink(), "has no config.json", "FOLDER_WITH"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors", "ANOTHER"),
    "empty weights": (write("model.safetensors", b""), "no safetensors file", "ANOTHER"),
    "text for weights": (write("model.safetensors", b"hello" * 99), "no safetensors", "ANOTHER"),
    "null header": (write("model.safetensors", b"\4" + b"\0" * 7 + b"null"), "no safet", "ANOTHER"),
    "odd header": (
        write("model.safetensors", b"\7" + b"\0" * 7 + b'{"a":1}'), "no safetens", "ANOTHER"
    ),
    "cut": (cut, "was not copied whole", "ANOTHER"),
    "lfs pointer": (lfs, "Git LFS pointer", "git lfs pull"),
    "shard missing": (lambda f: shard(f, drop=True), "files of weights are missing", "ANOTHER"),
    "index": (
        lambda f: (shard(f, drop=False), (f / "model.safetensors.index.json").write_text("[]")),
        "cannot be read", "ANOTHER",
    ),
    "no JSON": (write("config.json", b"{"), "is not JSON", "ANOTHER"),
    "not UTF-8": (write("config.json", b"\xff\xfe"), "is not JSON", "ANOTHER"),
    "no object": (write("config.json", b"[]"), "no model_type", "ANOTHER"),
    "no type": (lambda f: edit(f, model_type=None), "no model_type", "ANOTHER"),
    "no width": (lambda f: edit(f, hidden_size=None), "has no hidden_size", "ANOTHER"),
    "width of text": (lambda f: edit(f, hidden_size="32"), "'32', not a positive", "ANOTHER"),
    "negative": (lambda f: edit(f, num_hidden_layers=-2), "is -2, not a pos", "ANOTHER"),
    "tie of text": (lambda f: edit(f, tie_word_embeddings="no"), "not true or false", "ANOTHER"),
    "heads": (lambda f: edit(f, num_attention_heads=3), "no divisor of hidden_size", "ANOTHER"),
    "groups": (
        lambda f: edit(f, num_attention_heads=8, num_key_value_heads=3), "num_key_value_heads = 3",
        "ANOTHER",
    ),
    "fewer layers": (lambda f: edit(f, num_hidden_layers=1), "are of 2 layers", "was saved with"),
    "more layers": (lambda f: edit(f, num_hidden_layers=3), "are of 2 layers", "was saved with"),
    "other width": (lambda f: edit(f, hidden_size=64), "are 32 wide", "was saved with"),
    "other vocabulary": (lambda f: edit(f, vocab_size=99), "have 320 embeddings", "was saved"),
    "other inner": (lambda f: edit(f, intermediate_size=9), "are of 64", "was saved with"),
    "other architecture": (
        lambda f: edit(f, model_type="bert"), "no matrix embeddings.word", "was saved"
    ),
    "quantized": (
        lambda f: edit(f, quantization_config={"quant_method": "gptq"}), "quantized (gptq)",
        "UNQUANTIZED",
    ),
    "own code": (
        lambda f: edit(f, model_type="mine", auto_map={"AutoModel": "m.M"}), "never runs", "ANOTHER"
    ),
    "unknown to transformers": (
        lambda f: edit(f, model_type="mine"), "says model_type = mine, and transformers",
        "pip install --upgrade transformers",
    ),
    "adapter": (adapter, "an adapter (PEFT)", "model.name_or_path=org/base"),
    "pickled": (pickled, "which can run code", "convert it once"),
    "inside": (lambda f: inside(f, "final"), "a folder in it has", "/mine/final"),
    "run of eke": (run_folder, "is a run folder of eke", "/checkpoints/step-00000010"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_invalid_checkpoint_is_rejected_with_one_problem(folder, case):
    spoil, why, fix = BROKEN[case]
    spoil(folder)
    problem = refused(folder)
    assert problem.key == "model.name_or_path"
    assert problem.value == str(folder)
    assert why in problem.why
    assert fix in str(problem.fix)


@pytest.mark.parametrize("name", ["quote'); import os; os.abort(); ('", "dollar$(id)", "a b`id`"])
def test_proposed_command_quotes_the_folder_name(folder, name):
    pickled(folder)
    with pytest.raises(ConfigError) as caught:
        weight_files(LocalCheckpoint("typed", folder.rename(folder.with_name(name))))
    command = shlex.split(caught.value.problems[0].remark)
    code = ast.parse(command[command.index("-c") + 1])
    texts = [node.value for node in ast.walk(code) if isinstance(node, ast.Constant)]
    assert str(folder.with_name(name)) in texts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "architectures",
    "tie_word_embeddings", "quantization_config", "auto_map", "attention_bias", "num_experts",
)  # fmt: skip


@settings(max_examples=25)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
@pytest.mark.slow
def test_any_config_json_gives_a_plan_or_a_rejection(saved, tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("any") / "m"
    shutil.copytree(saved["llama"], folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    problems = []
    try:
        assert plan_of(folder).size.num_parameters > 0
    except ConfigError as error:
        problems = error.problems
    assert all(problem.why and str(problem.fix) for problem in problems)


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.slow
def test_invalid_weight_files_are_rejected(saved, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any") / "m"
    shutil.copytree(saved["llama"], folder)
    header = json.dumps(data.draw(st.dictionaries(st.text(max_size=4), JSON, max_size=3))).encode()
    length = data.draw(st.sampled_from([len(header), 0, 5, 2**40, 2**63]))
    rest = data.draw(st.binary(max_size=40))
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + rest)
    with pytest.raises(ConfigError):
        plan_of(folder)


def test_file_is_not_a_checkpoint(folder):
    problem = refused(folder / "model.safetensors")
    assert str(problem.fix) == f"model.name_or_path={folder}"


def test_revision_requires_a_hub_model(folder):
    assert refused(folder, "model.revision=main").key == "model.revision"


def test_neither_folder_nor_hub_name_is_rejected():
    for name in ("./nowhere", "/no/where", "~/nowhere", "a/b/c", "-x", "a b"):
        assert "no such folder, and it is no name" in refused(name).why, name


def test_unsuitable_architecture_for_a_task_is_rejected(saved):
    with pytest.raises(ConfigError) as caught:
        plan_of(saved["llama"], "task=masked_lm")
    (problem,) = caught.value.problems
    assert (problem.key, problem.id) == ("task", "task_needs_other_model")
    assert str(problem.fix).startswith("task=causal_lm")


def test_rules_use_checkpoint_values(saved):
    with pytest.raises(ConfigError) as caught:
        plan_of(saved["bert"], "task=masked_lm", "data.seq_len=129")
    assert [p.id for p in caught.value.problems] == ["sequence_fits_positions"]
    assert TASK_OF["bert"] == "masked_lm"


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "longt5"])
def test_float16_is_rejected_for_every_t5(kind, saved, tmp_path):
    edit(shutil.copytree(saved["t5"], tmp_path / "mine"), model_type=kind)
    plan = plan_of(tmp_path / "mine", "task=seq2seq_lm", "precision=fp16")
    assert any(kind in text and "bfloat16" in text for text in plan.warnings)


def test_source_and_target_have_positions(tmp_path):
    config = transformers.BartConfig(
        vocab_size=320, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path)
    plan_of(tmp_path, "task=seq2seq_lm", "task.target_len=32", "data.seq_len=32")
    for key, value in (("data.seq_len", 33), ("task.target_len", 40)):
        with pytest.raises(ConfigError) as caught:
            plan_of(tmp_path, "task=seq2seq_lm", f"{key}={value}")
        (found,) = caught.value.problems
        assert f"{value} is longer than the 32 tokens" in f"{found.value} {found.why}"
        assert str(found.fix) == f"{key}=32"


COMMIT = "c" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(hub, checkpoint, name="org/model", commit=COMMIT):
    place = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(checkpoint, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    return place / "snapshots" / commit


def test_cached_hub_model_is_planned_offline(hub, saved):
    put(hub, saved["llama"])
    by_branch, by_commit = plan_of("org/model"), plan_of("org/model", f"model.revision={COMMIT}")
    model = by_branch.config.model
    assert (model.name_or_path, model.content) == ("org/model", f"org/model@{COMMIT}")
    assert model.hidden_size == 32
    assert by_branch.run_id == by_commit.run_id


def test_tokenizer_has_the_commit_of_the_weights(hub, saved, monkeypatch):
    put(hub, saved["llama"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **more: asked.update(more)
    )
    typed = ["model=pretrained", "model.name_or_path=org/model", "data=python_source"]
    resolve_tokenizer(compose(typed).config)
    assert asked["revision"] == COMMIT


def test_uncached_model_offline_is_rejected(hub):
    problem = refused("org/absent")
    assert "cannot be reached (HF_HUB_OFFLINE is set)" in problem.why
    assert "hf download org/absent" in str(problem.fix)


def test_cached_model_without_weights_offline_is_rejected(hub, saved):
    (put(hub, saved["llama"]) / "model.safetensors").unlink()
    assert resolved("org/model").model.num_hidden_layers == 2
    assert "not in the hub's cache" in refused("org/model", planning=False).why


@pytest.mark.parametrize(
    ("error", "path", "words"),
    [
        ("RepositoryNotFoundError", "model.name_or_path", "no such model on the hub"),
        ("GatedRepoError", "model.name_or_path", "ask on its page"),
        ("RevisionNotFoundError", "model.revision", "no such branch"),
        ("EntryNotFoundError", "model.name_or_path", "has no config.json"),
        ("LocalEntryNotFoundError", "model.name_or_path", "cannot be reached"),
    ],
    ids=lambda value: value.split()[0],
)
def test_hub_errors_are_explained(hub, monkeypatch, error, path, words):
    from huggingface_hub import errors

    cls = getattr(errors, error)

    def fail(*args, **kwargs):
        raise cls.__new__(cls)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    problem = refused("org/model", "model.revision=v1")
    assert problem.key == path
    assert words in problem.why


def test_hub_retries_are_logged_on_one_line(hub, monkeypatch, capsys, caplog):
    """huggingface_hub tells each attempt in two lines of its own, for 23 seconds."""
    talker = logging.getLogger("huggingface_hub.utils._http")

    def fail(*args, **kwargs):
        talker.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    assert "cannot be reached" in refused("org/model").why
    assert capsys.readouterr().err == "asking the Hugging Face hub for org/model ...\n"
    assert not [r for r in caplog.records if r.name == talker.name]


@pytest.mark.slow
def test_planning_a_checkpoint_does_not_import_torch(saved, tmp_path):
    code = (
        "from eke.workflows import main\n"
        f"assert main(['model=pretrained', 'model.name_or_path={saved['llama']}',"
        " 'plan_only=true', 'data=synthetic', 'data.max_token=300']) == 0\n"
        "import sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_architectures_of_transformers_are_known(folder):
    """Also those whose source lies in a folder of another name."""
    for kind in ("phi", "hrm_text", "openai-gpt", "gemma3_text"):
        edit(folder, model_type=kind, architectures=["LlamaForCausalLM"])
        assert resolved(folder).model.model_type == kind


def test_per_layer_widths_leave_the_size_unknown(tmp_path):
    from eke.models.checkpoints.architecture import read_sizes

    raw = {"model_type": "gemma3n_text", "hidden_size": 32, "vocab_size": 64, "num_layers": 2}
    _, sizes = read_sizes({**raw, "intermediate_size": [48, 96]}, "folder")
    assert (sizes["intermediate_size"], sizes["num_hidden_layers"]) == (0, 2)
    with pytest.raises(ConfigError, match="not a positive whole number"):
        read_sizes({**raw, "hidden_size": [32, 32]}, "folder")


@pytest.mark.parametrize(
    ("changes", "why", "fix"),
    [
        ({"text_config": {"model_type": "gemma3_text"}, "vision_config": {}}, "text_config and "
         "vision_config", "Gemma3|from_pretrained"),
        ({"text_config": {"model_type": "qwen2_vl_text"}}, "multimodal", "ANOTHER"),
        ({"model_type": "qwen2_audio", "audio_config": {}}, "audio_config", "ANOTHER"),
    ],
    ids=["its text part is a model", "it is none", "sizes outside"],
)  # fmt: skip
def test_multimodal_checkpoint_names_a_loadable_class(folder, changes, why, fix):
    edit(folder, model_type="gemma3")
    edit(folder, **changes)
    problem = refused(folder)
    assert why in problem.why
    assert re.search(fix, str(problem.fix))


def test_audio_model_is_rejected_for_every_task(folder):
    edit(folder, model_type="whisper", architectures=["WhisperForConditionalGeneration"])
    for task in ("causal_lm", "seq2seq_lm"):
        assert "WhisperForConditionalGeneration" in refused(folder, f"task={task}").why


def test_adapter_with_config_json_is_not_a_model(folder):
    (folder / "adapter_config.json").write_text("{}")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert "holds an adapter" in refused(folder).why
