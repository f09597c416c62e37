"""Plans of a mix: samples by weight, the identity, forecasts, changed inputs, refused sources."""

import pytest
from chat_templates import FAMILIES, saved
from prepared import numbered, write_jsonl
from transformers import AutoTokenizer
from unit.plan.cases import config_of, plan_of

from eke.cli import main
from eke.common.errors import ChangedError, ConfigError
from eke.common.paths import RunPaths
from eke.data.preparation.rows import prepare_store
from eke.data.sources import open_store, request_of
from eke.hardware import detect
from eke.plan.planner import (
    check_inputs,
    evaluated,
    plans_of_sources,
    read_plan,
    render_plan,
    simulated_micro_batches,
    write_plan,
)
from eke.rules import RuleInputs, check
from eke.training.batches.dataset import build_data, load_plan_tokenizer
from eke.training.batches.tasks import chat_manifest, class_names

SHORT = ("data=mix", "data.seq_len=32", "batch.per_device=4", "train.steps=50")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Two files of rows with a column of classes, and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("eke.data.sources.request._run_preparation", prepare_store)
    write_jsonl(tmp_path / "a.jsonl", numbered(60))
    write_jsonl(tmp_path / "b.jsonl", [{"body": "x" * (n % 20 + 1)} for n in range(30)])
    (tmp_path / "c.txt").write_text("a text that is cut into windows. " * 60)
    return tmp_path


def listed(*weights: object, third: str = "option:text,path:c.txt") -> str:
    sources = ("option:jsonl,path:a.jsonl", "option:jsonl,path:b.jsonl,text:body", third)
    pairs = zip(sources, weights, strict=False)
    return f"data.sources=[{','.join(f'{{{text},weight:{weight}}}' for text, weight in pairs)}]"


def test_samples_of_a_mix_come_from_its_sources(folder) -> None:
    plan = plan_of(*SHORT, listed(5, 3, 2), "data.num_eval_samples=20")
    alone = [
        plan_of("data=jsonl", "data.path=a.jsonl", *SHORT[1:], "data.num_eval_samples=20"),
        plan_of("data=jsonl", "data.path=b.jsonl", "data.text=body", *SHORT[1:]),
        plan_of("data=text", "data.path=c.txt", *SHORT[1:]),
    ]
    assert [s.name for s in plan.sources] == ["a", "b", "c"]
    assert [s.share for s in plan.sources] == [0.5, 0.3, 0.2]
    assert [s.store for s in plan.sources] == [each.store for each in alone]
    assert [s.train for s in plan.sources] == [each.steps.num_train_samples for each in alone]
    assert plan.steps.num_train_samples == sum(s.train for s in plan.sources)
    wanted = [10, 6, 4]
    available = [each.steps.num_eval_samples for each in alone]
    found = [s.evaluation for s in plan.sources]
    assert found == [min(pair) for pair in zip(wanted, available, strict=True)]
    assert plan.steps.num_eval_samples == sum(found)
    text = render_plan(plan)
    assert all(f"source {name}" in text for name in "abc")
    assert "50.0%" in text


def test_each_source_is_evaluated_at_least_once() -> None:
    plan = plan_of(*SHORT, listed(1000, 1, 1), "data.num_eval_samples=4")
    assert [source.evaluation for source in plan.sources] == [4, 1, 1]


def test_sizes_are_the_default_weights() -> None:
    plan = plan_of(*SHORT, listed("null", "null", "null"))
    sizes = [source.train for source in plan.sources]
    assert [s.share for s in plan.sources] == [size / sum(sizes) for size in sizes]


def test_num_samples_limits_the_epoch_and_each_source() -> None:
    plan = plan_of(*SHORT, listed(1, 1), "data.num_samples=11")
    assert plan.steps.num_train_samples == 11
    limited = "data.sources=[{option:jsonl,path:a.jsonl,num_samples:7},{option:text,path:c.txt}]"
    assert plan_of(*SHORT, limited).sources[0].train == 7


def test_weights_names_and_content_change_the_run_id(folder) -> None:
    def run_id(*weights: object, **more: str) -> str:
        return plan_of(*SHORT, listed(*weights, **more)).run_id

    first = run_id(5, 3, 2)
    assert run_id(10, 6, 4) == first, "weights are relative"
    assert run_id(5, 3, 3) != first
    assert run_id(5, 3, 2, third="option:text,path:c.txt,name:other") != first
    (folder / "moved").mkdir()
    (folder / "c.txt").rename(folder / "moved" / "c.txt")
    assert run_id(5, 3, 2, third="option:text,path:moved/c.txt") == first
    (folder / "moved" / "c.txt").write_text("another text, as long as before. " * 60)
    assert run_id(5, 3, 2, third="option:text,path:moved/c.txt") != first


def test_plan_round_trips(folder) -> None:
    plan = plan_of(*SHORT, listed(5, 3, 2))
    paths = RunPaths(folder / "run")
    paths.folder.mkdir()
    write_plan(paths, plan)
    assert read_plan(paths) == plan
    assert len(plans_of_sources(plan)) == 3


def test_changed_text_is_rejected(folder) -> None:
    plan = plan_of(*SHORT, listed(5, 3, 2))
    check_inputs(plan)
    (folder / "c.txt").write_text("another text, as long as before. " * 60)
    with pytest.raises(ChangedError, match=r"c\.txt: its content has changed"):
        check_inputs(plan)


@pytest.mark.parametrize(
    "typed",
    [(), ("data.packing=on",), ("data.packing=padding_free",),
     ("data.length_grouping=true", "batch.accumulation=2"), ("data.pad_to_multiple_of=8",)],
    ids=["padded", "packed", "padding-free", "grouped", "multiple"],
)  # fmt: skip
@pytest.mark.parametrize("weights", [(5, 3, 2), (0.05, 0.95)], ids=["text too", "short rows"])
def test_forecast_micro_batches_of_a_mix_match_the_run(typed, weights) -> None:
    plan = plan_of(*SHORT, listed(*weights), *typed, "train.steps=400")
    data, found = build_data(plan), simulated_micro_batches(plan)
    sizes = [b.size for cut in data.train_steps(0) for b in cut if b.num_samples == 4]
    tokens = [size.tokens for size in sizes]
    assert found.shortest.tokens <= min(tokens)
    assert max(tokens) <= found.longest.tokens
    assert found.mean.tokens == pytest.approx(sum(tokens) / len(tokens), rel=0.1)
    assert found.expected.tokens == pytest.approx(max(tokens), rel=0.1)
    largest = max((batch.size for batch in data.eval_batches()), key=lambda size: size.tokens)
    assert evaluated(plan) == largest


def test_flops_of_a_mix_follow_drawn_tokens() -> None:
    long, short = (plan_of(*SHORT, listed(*weights)).size for weights in ((1, 99), (99, 1)))
    assert long.flops_per_sample is not None
    assert short.flops_per_sample > 1.2 * long.flops_per_sample


def refused(*overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as error:
        plan_of(*overrides)
    return [(problem.key, problem.why) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("content", "why"), [("", "empty"), ('{"text":""}\n', "empty"), ('{"text":"one"}\n', "row")]
)
def test_source_without_rows_is_rejected_by_name(content, why, folder) -> None:
    (folder / "bad.jsonl").write_text(content)
    third = "option:jsonl,path:bad.jsonl"
    [(key, said)] = refused(*SHORT, listed(1, 1, 1, third=third))
    assert key == "data.sources[2].path"
    assert why in said
    assert not (folder / "runs").exists()


def test_all_sources_are_checked(folder) -> None:
    (folder / "a.jsonl").write_text("")
    found = refused(*SHORT, listed(1, 1, 1, third="option:csv,path:none.csv"))
    assert [key for key, _ in found] == ["data.sources[0].path", "data.sources[2].path"]


def test_different_classes_are_rejected(folder) -> None:
    for name, labels in (("a", ["cat", "dog"]), ("b", ["cat", "cow"]), ("d", [0, 1])):
        rows = [{"text": f"{n}", "body": f"{n}", "label": labels[n % 2]} for n in range(40)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    base = (*SHORT, "model=tiny_bert", "task=sequence_classification")
    found = refused(*base, listed(1, 1, 1, third="option:jsonl,path:d.jsonl"))
    assert [key for key, _ in found] == ["data.sources[1]", "data.sources[2]"]
    assert all("cat, dog" in why for _, why in found)
    plan_of(*base, listed(1))


def test_class_numbers_of_sources_are_unified(folder) -> None:
    import datasets  # slow, and only this test needs it

    for name, names in (("a", ["cat", "dog"]), ("b", ["dog", "cat"])):
        features = datasets.Features(
            text=datasets.Value("string"), label=datasets.ClassLabel(names=names)
        )
        rows = [{"text": f"{name} {n}", "label": n % 2} for n in range(40)]
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / f"{name}.parquet")
    parts = "{option:parquet,path:a.parquet},{option:parquet,path:b.parquet}"
    base = (*SHORT, f"data.sources=[{parts}]", "model=tiny_bert",
            "task=sequence_classification")  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        plan_of(*base)
    plan = plan_of(*base, *caught.value.problems[0].fix.words)
    assert class_names(plan) == ("cat", "dog")
    stores = [open_store(request_of(part.config)) for part in plans_of_sources(plan)]
    assert [store.array("labels")[:2].tolist() for store in stores] == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("third", "key", "fix"),
    [
        ("option:jsonl,path:a.jsonl,name:q,prompt:x", "data.sources[2].prompt",
         "data.sources.2.response=response"),
        ("option:jsonl,path:a.jsonl,name:q,eval_frac:2", "data.sources[2].eval_frac",
         "data.sources.2.eval_frac=0.1"),
        ("option:chat,path:a.jsonl,name:q", "data.tokenizer",
         "data.tokenizer=FOLDER_OR_HUB_NAME"),
    ],
    ids=["prompt", "limit", "chat"],
)  # fmt: skip
def test_rules_check_each_source(third, key, fix) -> None:
    config = config_of("data=mix", "data.sources=[]")
    sources = [{"option": "jsonl", "path": "a.jsonl"}, {"option": "text", "path": "c.txt"}]
    pairs = (part.split(":", 1) for part in third.split(","))
    values = {"2": 2.0}
    config.data.sources = [*sources, {name: values.get(text, text) for name, text in pairs}]
    found, _ = check(RuleInputs(config, detect(), planning=True))
    assert [(p.key, p.fix.words[0]) for p in found] == [(key, fix)]


STREAM = "option:jsonl,path:a.jsonl,name:q,streaming:true"


def test_stream_is_another_run_with_uncounted_rows() -> None:
    third = STREAM, f"{STREAM},shuffle_buffer:9", f"{STREAM},num_samples:20"
    third = *third, "option:jsonl,path:a.jsonl,name:q"
    few = (*SHORT, "data.num_eval_samples=10")
    plans = [plan_of(*few, listed(5, 3, 2, third=text)) for text in third]
    assert len({plan.run_id for plan in plans}) == 4
    assert "40 of a stream" in render_plan(plans[0])  # 50 steps of 4, a fifth of them
    assert "2.00 epochs of 20 samples" in render_plan(plans[2])
    assert plans[0].steps.total == plans[0].steps.per_epoch == 50
    assert simulated_micro_batches(plans[0]).longest.source == 32


def test_stream_is_not_packed() -> None:
    third = [f"data.{key}" for key in ("packing=on", "length_grouping=true")]
    for word in third:
        config = config_of(*SHORT, word, listed(5, 3, 2, third=STREAM))
        found, _ = check(RuleInputs(config, detect(), planning=True))
        assert [problem.key for problem in found] == ["data.sources[2].streaming"]


def test_epochs_of_a_mixed_stream_need_a_length() -> None:
    source = listed(5, 3, 2, third=STREAM)
    typed = (*SHORT[:3], "data.num_eval_samples=10", "train.epochs=2", source)
    found, _ = check(RuleInputs(config_of(*typed), detect(), planning=True))
    assert [problem.id for problem in found] == ["stream_needs_steps"]
    assert plan_of(*typed, "data.num_samples=40").steps.total == 20


def test_data_show_names_each_source(capsys) -> None:
    assert main(["data", "show", "--rows", "1", *SHORT[:2], listed(5, 3, 2)]) == 0
    out = capsys.readouterr().out
    assert "source a: 50.0% of the samples\n\nrow 1" in out
    assert "source c: 20.0% of the samples\n\ntext without rows" in out


def test_packing_useful_for_one_source_gives_no_warning() -> None:
    config = config_of(*SHORT, "data.packing=on", listed(5, 3, 2))
    _, warned = check(RuleInputs(config, detect(), planning=True))
    assert [problem.key for problem in warned if "packing" in problem.key] == []


def talks(folder, *templates: str) -> str:
    """A mix of conversations of a file, of the hub, and of a text."""
    saved(FAMILIES["chatml"], folder / "tok")
    for word in ("be", "so"):
        (folder / f"{word}.jinja").write_text(f"{{{{ '{word} ' }}}}{FAMILIES['chatml'].template}")
    (folder / "set").mkdir()
    rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "so."}]
            for n in range(12)]  # fmt: skip
    for place in ("chat.jsonl", "set/train.jsonl"):
        write_jsonl(folder / place, [{"messages": each} for each in rows])
    both = zip(("option:chat_hub,name:set", "option:chat,path:chat.jsonl"), templates, strict=True)
    each = [f"{{{place},chat_template:{template}}}" for place, template in both]
    return f"data.sources=[{{option:jsonl,path:a.jsonl}},{','.join(each)}]"


def test_conversations_have_one_template(folder) -> None:
    typed = (*SHORT, "data.tokenizer=tok", "model.vocab_size=330")
    given = talks(folder, "be.jinja", "so.jinja")
    with pytest.raises(ConfigError) as error:
        plan_of(*typed, given)
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == ("data.sources[2].chat_template", "so.jinja")
    assert problem.overrides == ("data.sources.2.chat_template=be.jinja",)
    plan = plan_of(*typed, given, *problem.overrides)
    assert load_plan_tokenizer(plan).chat_template == (folder / "be.jinja").read_text()
    manifest = chat_manifest(plan)
    assert manifest is not None
    words = AutoTokenizer.from_pretrained("tok").convert_ids_to_tokens(manifest.ends_of_turn)
    assert words == ["<|im_end|>"]
