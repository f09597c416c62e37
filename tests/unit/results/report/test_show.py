"""The same comparison as a terminal's table, Markdown, JSON, CSV and the data of a page."""

import csv
import io
import itertools
import json
import re

import pytest
import yaml
from unit.results.report.made import MACHINE, MIB, Run, make_record, make_run, make_sweep

from eke.common.files import json_safe
from eke.common.output import CONTROL, escape
from eke.results.card import render_card
from eke.results.report.compare import compare_runs
from eke.results.report.show import charts as drawing
from eke.results.report.show import file_formats as show
from eke.results.report.show.charts import CHARS_FOR_LABELS
from eke.results.report.show.file_formats import (
    as_csv,
    as_plain,
    render_markdown,
    render_page,
    table_data,
    vega_script,
)
from eke.results.report.show.report_sections import report_title, sections
from eke.results.report.show.table import CHARS_FOR_NAMES, shortened
from eke.results.report.show.terminal import MAX_ROWS, render_terminal

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> | `a` *b* \x1b[31m"


@pytest.fixture
def ladder(tmp_path):
    runs = [
        Run({"precision": p, "optimizer": o}, repeat=r, speed=s * (1 + r / 100), peak=m * MIB)
        for r in range(3)
        for p, o, s, m in (
            ("fp32", "adamw", 100, 100),
            ("bf16", "adamw", 200, 70),
            ("fp32", "lion", 101, 80),
            ("bf16", "lion", 205, 50),
        )
    ]
    refused = Run({"precision": "fp16"}, outcome="refused", reason="needs a GPU -> precision=bf16")
    return compare_runs([make_sweep(tmp_path, [*runs, refused])])


@pytest.fixture
def hostile(tmp_path):
    runs = [
        Run({"precision": "fp32"}, overrides=(HOSTILE,)),
        Run({"precision": "bf16"}, outcome="crashed", reason=HOSTILE, speed=None),
        Run({"precision": "fp16"}, keys={"optimizer.lr": "\U0001f600" * 300}),
        Run({"precision": "fp8"}, keys={"optimizer.lr": "=HYPERLINK(1)"}, loss=float("nan")),
    ]
    return compare_runs([make_sweep(tmp_path / "hostile", runs, ["", "", "", "=1+1" + HOSTILE])])


def charts(comparison):
    """Title -> chart, of all machines."""
    return {c.title: c for part in comparison.machines for c in drawing.charts(comparison, part)}


def test_terminal_shows_verdict_numbers_and_failures(ladder):
    text = render_terminal(ladder, width=150)
    lines = text.splitlines()
    assert lines[0].startswith("tiny, python_source (256 tokens), 1 x GPU: 5 configurations x 3")
    assert lines[1].startswith("bf16 + lion is fastest of those with 3 repeats: 2.05x")
    assert re.search(r"\nbf16 +202 samples/s, 2\.00x faster ", text)
    assert re.search(r"\nfp16 +refused", text)
    assert "needs a GPU -> precision=bf16" in text
    assert "13 runs of 5 configurations: 12 ok, 1 refused" in lines[-1]
    assert "\x1b" not in text
    assert "\x1b[" in render_terminal(ladder, colours=True, width=100)


def test_provenance_is_one_line_or_complete(ladder):
    short = render_terminal(ladder, width=150)
    assert "torch 2.13.0" in short.splitlines()[-1]
    assert "step clock" not in short
    text = render_terminal(ladder, width=150, everything=True)
    assert "step clock" in text
    assert "eke_source" not in text
    assert len(text.splitlines()) > len(short.splitlines()) + 5


def test_terminal_text_is_escaped(hostile):
    text = render_terminal(hostile, width=150)
    assert "\x1b" not in text
    assert "\N{REPLACEMENT CHARACTER}[31m" in text


def test_baseline_has_the_selected_metric(tmp_path):
    runs = [Run({"optimizer": o}, seed=n, repeat=n, metrics={"accuracy": a + n / 100}, loss=0.5)
            for n in range(3) for o, a in (("adamw", 0.8), ("lion", 0.9))]  # fmt: skip
    found = compare_runs([make_sweep(tmp_path, runs)], by="accuracy")
    rows = table_data(found, found.rows)
    at = [column["title"] for column in rows["columns"]].index("accuracy")
    cells = {row["class"]: row["cells"][at] for row in rows["rows"]}
    assert cells["baseline"] == "0.81"
    assert cells[""][1].endswith("0.91")


def test_techniques_share_one_table_unless_redundant(tmp_path):
    runs = [
        Run({"precision": p, "optimizer": o, "memory": m}, repeat=r, speed=s * (1 + r / 100))
        for r in range(3)
        for n, (p, o, m) in enumerate(itertools.product(("fp32", "bf16"), ("adamw", "lion"),
                                                        ("none", "checkpointing")))
        for s in [100.0 + 10 * n]
    ]  # fmt: skip
    (found,) = sections(compare_runs([make_sweep(tmp_path / "8", runs)]))
    assert found.head == (
        "technique", "alone: speed", "memory", "over pairs: speed", "memory", "pairs",
        "cumulative: speed", "memory",
    )  # fmt: skip
    assert [row[0].split()[0] for row in found.rows] == [
        "precision=bf16", "optimizer=lion", "memory=checkpointing"
    ]  # fmt: skip
    assert {row[5] for row in found.rows} == {"4"}
    four = [run for run in runs if run.choices["memory"] == "none"]
    assert sections(compare_runs([make_sweep(tmp_path / "4", four)])) == []
    (asked,) = sections(compare_runs([tmp_path / "4"], by="optimizer"))
    assert any("over pairs" in title for title in asked.head)


def test_long_table_is_cut_with_a_note(tmp_path):
    runs = [Run({"precision": "fp32"}, keys={"optimizer.lr": n}, speed=float(n))
            for n in range(1, MAX_ROWS + 11)]  # fmt: skip
    text = render_terminal(compare_runs([make_sweep(tmp_path, runs)]), width=150)
    assert " 10 more: " in text


def test_repeats_are_listed_on_request(ladder):
    assert "Every run" not in render_terminal(ladder, width=150)
    assert "Every run" in render_terminal(ladder, repeats=True, width=150)
    assert render_markdown(ladder, repeats=True).count("| bf16 + lion |") >= 4


def test_markdown_tables_are_aligned(ladder):
    lines = render_markdown(ladder).splitlines()
    assert lines[2].startswith("**bf16 + lion ")
    at = next(n for n, line in enumerate(lines) if line.startswith("| configuration"))
    width = lines[at].count("|")
    assert [line.count("|") for line in lines[at : at + 7]] == [width] * 7


def test_markdown_escapes_foreign_markup(hostile):
    text = render_markdown(hostile)
    assert "<script" not in text
    assert "<img" not in text
    for block in re.split(r"\n\n", text):
        bars = [len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()]
        assert len(set(bars)) == 1, "every line of a table has as many cells"
    assert escape("a|b\n`c`<d>") == "a\\|b \\`c\\`&lt;d&gt;"


def test_json_is_complete(ladder, hostile):
    assert json.dumps(json_safe(as_plain(hostile)), allow_nan=False)
    found = as_plain(ladder)
    assert found["schema_version"] == 1
    assert found["verdict"][0].startswith("bf16 + lion ")
    row = found["configurations"][3]
    assert row["ratios"]["throughput.samples_per_s"]["decision"] == "higher"
    assert [run["repeat"] for run in row["runs"]] == [0, 1, 2]
    assert found["configurations"][4]["runs"][0]["reason"].startswith("needs a GPU")


def test_csv_has_one_line_per_run(ladder):
    rows = list(csv.DictReader(io.StringIO(as_csv(ladder))))
    assert len(rows) == 13
    assert rows[0]["throughput.samples_per_s"] == "100.0"
    assert rows[-1]["outcome"] == "refused"
    assert rows[-1]["throughput.samples_per_s"] == ""


def test_csv_cells_are_never_formulas(tmp_path):
    names = ("=HYPERLINK(1)", " =1+1", "\n=1", "\uff1d1")
    runs = [Run(overrides=(f"seed={n}",), seed=n, keys={"data.path": name})
            for n, name in enumerate(names)]  # fmt: skip
    text = as_csv(compare_runs([make_sweep(tmp_path, runs)]))
    comparison = compare_runs([make_sweep(tmp_path / "b", [Run(), Run(seed=1)])])
    object.__setattr__(comparison, "factors", ("=cmd|1",))
    for found in (text, as_csv(comparison)):
        rows = list(csv.reader(io.StringIO(found)))
        starts = {cell.lstrip()[:1] for row in rows for cell in row}
        assert not starts & {"=", "+", "@", "\uff1d"}


@pytest.mark.slow
def test_page_escapes_all_texts(hostile):
    page = render_page(hostile)
    assert page.count("</script>") == 3
    page = page.replace(vega_script(), "")
    assert "<script>alert" not in page
    assert "<img src" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page), "nothing is loaded"
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["tables"][0]["rows"][0]["full"]


def test_table_sorts_by_numbers(ladder):
    found = table_data(ladder, ladder.rows)
    titles = [column["title"] for column in found["columns"]]
    at = titles.index("samples/s")
    assert found["rows"][0]["values"][at] == pytest.approx(100.997, abs=0.01)
    first, second = (row["cells"][titles.index("speed")] for row in found["rows"][:2])
    assert first == "101 samples/s"
    assert second == ["2.00x faster", "202 samples/s", "good"]  # equal repeats: no interval
    assert [row["class"] for row in found["rows"]] == ["baseline", "", "", "", "bad"]
    main = [column["title"] for column in found["columns"] if column["main"]]
    assert main == ["configuration", "speed", "memory", "eval loss", "decision", "repeats"]


@pytest.mark.slow
def test_charts_are_valid_and_omitted_without_data(ladder, tmp_path):
    import vl_convert

    found = charts(ladder)
    assert list(found) == [
        "Speed and memory", "Relative to the baseline", "Time of a step"
    ]  # fmt: skip
    make_run(tmp_path / "one", Run({"precision": "bf16"}), [3.0, 2.0, 1.0])
    found |= charts(compare_runs([tmp_path / "one"]))
    assert "Loss over training" in found
    for chart in found.values():
        drawn = vl_convert.vegalite_to_svg({**chart.spec, "width": 400})
        assert "<svg" in drawn
        assert "NaN" not in drawn


@pytest.fixture
def told(tmp_path):
    runs = [Run({"precision": "fp32"}, predicted_step=1.25),
            Run({"precision": "bf16"}, speed=200, predicted_step=0.9)]  # fmt: skip
    return compare_runs([make_sweep(tmp_path / "told", runs)])


def test_predicted_step_times_are_in_every_format(told, ladder):
    assert "predicted step" not in json.dumps(table_data(ladder, ladder.rows))
    page, files = table_data(told, told.rows), as_plain(told)["configurations"]
    titles = [column["title"] for column in page["columns"]]
    at = titles.index("predicted step")
    assert [row["cells"][at] for row in page["rows"]] == ["+25.0 %", "-10.0 %"]
    assert [each["step_prediction_error"] for each in files] == pytest.approx([0.25, -0.1])
    rows = list(csv.DictReader(io.StringIO(as_csv(told))))
    assert [float(row["timing.predicted_step_s.expected"]) for row in rows] == pytest.approx(
        [0.1, 0.036]
    )


def test_losses_are_drawn_over_steps_with_every_seed_and_their_mean(tmp_path):
    make_run(tmp_path / "a", Run({"precision": "fp32"}), [3.0, 2.0, 1.0])
    make_run(tmp_path / "a1", Run({"precision": "fp32"}, seed=1), [4.0, 2.0, 2.0])
    make_run(tmp_path / "b", Run({"precision": "bf16"}), [3.0, 2.5, float("inf")])
    chart = charts(compare_runs([tmp_path]))["Loss over training"]
    points = chart.spec["data"]["values"]
    lines = {}
    for p in points:
        lines.setdefault((p["c"], p["s"]), []).append((p["steps"], p["loss"]))
    assert lines == {
        (0, 0): [(1, 3.5), (2, 2.0), (3, 1.5)],
        (0, 1): [(1, 3.0), (2, 2.0), (3, 1.0)],
        (0, 2): [(1, 4.0), (2, 2.0), (3, 2.0)],
        (1, 0): [(1, 3.0), (2, 2.5)],
    }
    assert [label for label, _ in chart.legend] == ["fp32", "bf16"]
    lookup = chart.spec["transform"][0]["from"]["data"]["values"]
    assert [line["each"] for line in lookup] == [8, 8], "samples of a step"


def test_line_labels_do_not_overlap(tmp_path):
    for n in range(8):  # all end alike
        run = Run({"precision": "fp32"}, keys={"optimizer.lr": n})
        make_run(tmp_path / str(n), run, [3.0, 1.0 + n / 1e4])
    spec = charts(compare_runs([tmp_path]))["Loss over training"].spec
    layer = next(each for each in spec["layer"] if each.get("name") == "ends")
    low, high = layer["encoding"]["y"]["scale"]["domain"]
    places = [(mark["loss"] - low) / (high - low) * spec["height"]
              for mark in layer["data"]["values"]]  # fmt: skip
    assert all(a - b > 14.9 for a, b in itertools.pairwise(places)), places
    assert min(places) > -0.1


def test_axis_spans_at_least_5_percent(tmp_path):
    """Three equal memories, a byte apart, are one place on the chart."""
    runs = [Run({"precision": p}, speed=s, peak=100 * MIB + n)
            for n, (p, s) in enumerate([("fp32", 100), ("bf16", 101), ("tf32", 100)])]  # fmt: skip
    spec = charts(compare_runs([make_sweep(tmp_path, runs)]))["Speed and memory"].spec
    for axis in ("x", "y"):
        low, high = spec["layer"][0]["encoding"][axis]["scale"]["domain"]
        assert high - low >= 0.05 * high / 1.05


def test_whiskers_match_table_intervals(ladder):
    chart = charts(ladder)["Speed and memory"].spec["data"]["values"]
    rows = {row.variant.label: row for row in ladder.rows}
    for point in chart:
        ratio = rows[point["name"]].ratios.get("throughput.samples_per_s")
        if ratio is None:
            assert point["low"] is None
        else:
            base = point["speed"] / ratio.value
            assert point["low"] / base == pytest.approx(ratio.low)
            assert point["high"] / base == pytest.approx(ratio.high)


def test_single_run_has_a_report(tmp_path):
    make_run(tmp_path / "one", Run({"precision": "bf16"}))
    found = compare_runs([tmp_path / "one"])
    assert "1 configuration" in render_terminal(found, width=120)
    assert "samples/s" in render_page(found)
    assert report_title(found) == "tiny, python_source (256 tokens), 1 x GPU: 1 configuration x 1"


def test_title_without_runs_is_empty(tmp_path):
    runs = [Run({"precision": "fp16"}, outcome="refused", reason="no"), Run(outcome="not run")]
    found = compare_runs([make_sweep(tmp_path, runs)])
    assert report_title(found) == "2 configurations"
    assert "refused" in render_page(found)


LONG = "model=pretrained task=causal_lm train.steps=2 data=jsonl data.path=a.jsonl "


def test_shortened_labels_are_unique():
    labels = [
        f"{LONG}model.name_or_path=/m/llama peft=none",
        f"{LONG}model.name_or_path=/m/llama_tied peft=lora",
        "short",
        "x" * 50 + "1" + "x" * 50,
        "x" * 50 + "2" + "x" * 50,
    ]
    found = shortened(labels)
    assert found[0].endswith("/m/llama peft=none")
    assert found[2] == "short"
    assert len(set(found)) == len(labels)
    assert max(map(len, found)) <= CHARS_FOR_NAMES + len("4: ")


def test_chart_labels_of_long_names_are_unique(tmp_path):
    """Vega cuts what is too long at its end, where names differ; tooltips have all of them."""
    runs = [
        Run(keys={"distributed.deepspeed_config": f"{'folder/' * 12}{n}.jsonl"}, speed=1.0 + n)
        for n in range(3)
    ]
    drawn = charts(compare_runs([make_sweep(tmp_path, runs)]))
    values = drawn["Time of a step"].spec["data"]["values"]
    assert {v["label"][-8:] for v in values} == {"/0.jsonl", "/1.jsonl", "/2.jsonl"}
    assert all(len(v["label"]) <= CHARS_FOR_LABELS < len(v["name"]) for v in values)


WORDS = ("fp32", "bf16", "adamw", "adafactor", "adamw_8bit", "checkpointing", "none")
TECHNIQUES = (
    ("fp32", "adamw", "none", 100), ("bf16", "adamw", "none", 190),
    ("fp32", "adafactor", "none", 92), ("fp32", "adamw_8bit", "checkpointing", 70),
)  # fmt: skip


@pytest.mark.parametrize(("width", "repeats"), [(80, 1), (80, 3), (100, 3), (120, 1)])
def test_table_never_breaks_a_word(width, repeats, tmp_path):
    """Whole lines for each configuration, without what has no room, which is named."""
    runs = [
        Run({"precision": p, "optimizer": o, "memory": m}, repeat=r, speed=s * (1 + r / 50))
        for r in range(repeats)
        for p, o, m, s in TECHNIQUES
    ]
    refused = Run({"precision": "tf32"}, outcome="refused", reason="no GPU -> precision=bf16")
    comparison = compare_runs([make_sweep(tmp_path, [*runs, refused])])
    lines = render_terminal(comparison, width=width).splitlines()
    assert max(map(len, lines)) <= width
    broken = {word[:n] for word in WORDS for n in range(4, len(word))}
    assert not {word for line in lines for word in re.split(r"[ =]", line)} & (broken - set(WORDS))
    start = next(n for n, line in enumerate(lines) if line.startswith("configuration "))
    assert "memory" in lines[start]
    for (*options, speed), line in zip(TECHNIQUES, lines[start + 1 :], strict=False):
        assert all(option in line for option in options if option not in ("fp32", "none", "adamw"))
        assert speed == 100 or f"{speed / 100:.2f}x" in line
        assert repeats == 1 or speed == 100 or {"faster", "slower"} & set(line.split())


def test_forty_columns_keep_the_first_two(ladder):
    lines = render_terminal(ladder, width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert any("2.05x faster" in line for line in lines), lines
    lines = render_terminal(ladder, width=40, everything=True).splitlines()
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize(("width", "level"), [(60, 0), (100, 1), (160, 2)])
def test_wide_terminal_shows_intervals_and_values(tmp_path, width, level):
    runs = [
        Run({"precision": p}, repeat=r, speed=s * (1 + w * r / 50))
        for r in range(3)
        for p, s, w in (("fp32", 100, 1), ("bf16", 190, -1), ("tf32", 120, 2))
    ]
    text = render_terminal(compare_runs([make_sweep(tmp_path, runs)]), width=width)
    line = next(line for line in text.splitlines() if line.startswith("bf16  "))
    assert "x faster" in line
    assert (" to " in line) == (level > 0)
    assert (" samples/s, " in line) == (level > 1)


def test_missing_speed_has_a_reason(tmp_path):
    runs = [
        Run({"precision": "fp32"}),
        Run({"precision": "bf16"}, speed=None, steps=4),
        Run({"precision": "tf32"}, shared=True),
        Run({"precision": "fp16"}, outcome="oom", speed=None, reason="forward"),
    ]
    text = render_terminal(compare_runs([make_sweep(tmp_path, runs)]), width=120)
    told = text.partition("No speed\n")[2].partition("\n\n")[0]
    assert re.search(r"bf16 +none of 4 ", told)
    assert re.search(r"tf32 +another process used its device", told)
    assert "fp16" not in told


NASTY = "\x1b]52;c;YQ==\x07\u202e<script>\n# b ![a](http://b) `c` \ud800 =1"


@pytest.fixture
def nasty(tmp_path):
    """A comparison of records whose texts are hostile."""
    machine = {**MACHINE, "device": NASTY}
    runs = [Run({"precision": p}, machine=machine, keys={"data.path": f"={NASTY}{p}"},
                overrides=(NASTY + p,)) for p in ("fp32", "bf16")]  # fmt: skip
    return compare_runs([make_sweep(tmp_path, runs, name=NASTY)])


def test_formats_contain_no_control_characters(nasty, monkeypatch) -> None:
    monkeypatch.setattr(show, "vega_script", lambda: "vega")
    page = render_page(nasty)
    for text in (page, render_markdown(nasty), as_csv(nasty)):
        assert not CONTROL.search(text)
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert not CONTROL.search(json.dumps(data, ensure_ascii=False))


def test_vl_convert_crash_removes_only_charts(ladder, monkeypatch, tmp_path) -> None:
    (tmp_path / "vl_convert.py").write_text("import os; os.kill(os.getpid(), 5)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(show, "cache_folder", lambda: tmp_path)
    page = render_page(ladder)
    assert "no charts" in page
    assert "vegaEmbed" not in page.split("<body>")[0]
    assert json.loads(page.split('id="data">')[1].split("</script>")[0])["specs"] == []
    assert not (tmp_path / "report").exists()


def test_model_card_escapes_record_texts() -> None:
    record = make_record("a" * 16, Run(machine={**MACHINE, "device": NASTY}, metrics={NASTY: 0.5}))
    record.name, record.command = NASTY, ["train.py", NASTY]
    record.config["model"]["name_or_path"] = f"a/b\n{NASTY}"
    record.config["data"]["name"] = "owner/name\u202e"
    card = render_card(record)
    assert not CONTROL.search(card)
    assert not re.search(r"<script>|^# b|[^\\]!\[|[^\\]`", card, re.MULTILINE)
    _, head, _ = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "transformers"}
    record.config["model"]["name_or_path"] = record.config["data"]["name"] = "owner/name"
    head = yaml.safe_load(render_card(record).split("---\n", 2)[1])
    assert head["base_model"] == "owner/name"
    assert head["datasets"] == ["owner/name"]
