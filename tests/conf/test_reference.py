"""Generated pages of docs/ match code and records. `make pages` rewrites them."""

import json
import os
import re
import shlex
from dataclasses import fields

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from reference import configuration
from reference.cards import TECHNIQUES
from reference.coming_from import coming_from_page
from reference.configuration import configuration_pages, derived_example, example
from reference.measured import cell, read_measured
from reference.measured_page import measured_page
from reference.published import ROWS
from reference.rules_page import rules_page
from reference.seen import Seen, describe, observations, read_seen
from reference.techniques import techniques_page
from reference.what_to_type import (
    ADAPTERS,
    ALL,
    CANDIDATES,
    GPUS,
    MODELS,
    figures_of,
    plan,
    what_to_type_page,
)
from support import REPO

from eke.config.compose import compose
from eke.config.compose.catalogue import FIXED_FIELDS, is_valid_value, make_catalogue
from eke.config.schema import ENTRIES
from eke.config.schema.fields import field_docs

DOCS = REPO / "docs"


def compare(name: str, fresh: str) -> None:
    page = DOCS / name
    if os.environ.get("EKE_UPDATE"):
        page.write_text(fresh)
    else:
        assert fresh == page.read_text(), "make pages"


def test_techniques_page_is_up_to_date() -> None:
    compare("reference/techniques.md", techniques_page(REPO / "results"))


def test_measured_page_is_up_to_date() -> None:
    compare("reference/measured.md", measured_page(REPO / "results"))


def test_page_of_other_tools_is_up_to_date() -> None:
    compare("coming-from.md", coming_from_page())


def test_configuration_pages_are_up_to_date() -> None:
    pages = configuration_pages()
    for name, text in pages.items():
        compare(f"reference/configuration/{name}", text)
    assert {path.name for path in (DOCS / "reference/configuration").iterdir()} == set(pages)


CATALOGUE = make_catalogue()
KEYS = {
    key: field
    for key, field in CATALOGUE.keys.items()
    if key.rpartition(".")[2] not in FIXED_FIELDS
}


@pytest.mark.parametrize("key", KEYS)
def test_example_of_a_key_is_valid(key: str) -> None:
    (typed,) = shlex.split(example(key, KEYS[key]))
    (override,) = OverridesParser.create().parse_overrides([typed])
    value = override.value()
    assert is_valid_value(KEYS[key], value), typed
    if KEYS[key].limit and value is not None:
        assert KEYS[key].limit.admits(value), typed


def test_no_example_is_kept_by_hand_that_the_schema_shows() -> None:
    """A key of the list exists, and its type or default shows no other value than the default."""
    for key in configuration._EXAMPLES:
        shown = derived_example(key, KEYS[key]).partition("=")[2]
        assert KEYS[key].kind not in (int, float, bool) or KEYS[key].default is None, key
        assert configuration._EXAMPLES[key] != shown, key


def test_every_key_shows_type_default_and_example() -> None:
    rows = {}
    for page in configuration_pages().values():
        for line in page.splitlines():
            if match := re.match(r"\| `([\w.]+)` \| ([^|]+) \| (`[^`]+`.*?|required) \| ", line):
                rows[match[1]] = match.groups()
    settable = {
        f"{section}.{name}"
        for section, classes in CATALOGUE.sections.items()
        for each in classes
        for name, text in field_docs(each).items()
        if not text.startswith("Filled in") and f"{section}.{name}" in KEYS
    }
    entries = {
        f"{group}.NAME.{field.name}" for group, cls in ENTRIES.items() for field in fields(cls)
    }
    root = {key for key in KEYS if "." not in key and key not in ENTRIES}
    assert set(rows) == settable | entries | root


@pytest.mark.parametrize(
    ("gpu", "model", "weights"), [("rtx3090", "tiny", ALL), ("rtx4090", "llama2_7b", ADAPTERS)]
)
def test_cells_of_what_to_type_are_up_to_date(gpu, model, weights, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no corrections from runs
    text = (DOCS / "what-to-type.md").read_text()
    section = text.partition(f"## {GPUS[gpu][0]}")[2].partition("\n## ")[0]
    (line,) = re.findall(rf"^\| {model} \([^)]*\) \| {weights} \|.*$", section, re.M)
    command, memory, speed = line.split(" | ")[2:5]
    typed = command.strip("`").split()
    answer = plan((*typed, f"hardware={gpu}"))
    assert answer["memory"]["predicted"]["verdict"] == "fits"
    assert [memory, speed] == figures_of(answer)
    shorter = [c for c in CANDIDATES[weights] if len(c) < len(typed) - 1]
    for candidate in shorter:
        other = plan((f"model={model}", *candidate, f"hardware={gpu}"))
        assert other is None or other["memory"]["predicted"]["verdict"] != "fits", candidate


@pytest.mark.parametrize("kind", CANDIDATES)
def test_commands_of_what_to_type_compose(kind) -> None:
    assert set(GPUS) <= set(CATALOGUE.options["hardware"])
    for model in {name for name, weights, _ in MODELS if weights == kind}:
        for candidate in CANDIDATES[kind]:
            compose([f"model={model}", *candidate])
    lengths = [len(each) for each in CANDIDATES[kind][:-1]]
    assert lengths == sorted(lengths), "shortest first; the last offloads"


@pytest.mark.skipif(not os.environ.get("EKE_UPDATE"), reason="minutes: `make pages` only")
def test_what_to_type_is_rewritten() -> None:
    compare("what-to-type.md", what_to_type_page(REPO / "results"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.technique)
def test_guides_rows_are_commands_that_compose(row) -> None:
    compose(["experiment=guide_single_gpu", *row.overrides.split()])


@pytest.mark.slow
def test_rules_page_is_up_to_date(tmp_path) -> None:
    compare("reference/rules.md", rules_page(tmp_path))


def test_every_option_has_been_tried_on_a_cpu() -> None:
    """A new option: `python benchmarks/techniques.py group=option`."""
    (cpu,) = (seen for seen in read_seen(REPO / "results") if seen.device == "CPU")
    catalogue = make_catalogue()
    options = [f"{group}={name}" for group in TECHNIQUES for name in catalogue.options[group]]
    options.remove("optimizer=custom")  # own code: tests/equivalence/test_own_code.py
    untried = [o for o in options if cpu.row(o).get("outcome") not in ("ok", "refused")]
    assert not untried


PLAIN_ROW = {
    "outcome": "ok",
    "with": [],
    "run_id": "0",
    "without_effect": [],
    "effective": {"layers_recomputed": 0, "matmul_dtypes": ["float32"]},
    "peak_allocated_bytes": 40 * 2**20,
}


def row(**changes: object) -> dict:
    return {**PLAIN_ROW, **changes}


SEEN = [
    Seen(
        "CPU",
        {},
        {
            "precision=fp32": PLAIN_ROW,
            "memory=checkpointing": row(
                effective={"layers_recomputed": 4}, peak_allocated_bytes=30 * 2**20
            ),
            "memory=empty_cache": row(
                without_effect=[{"path": "memory.empty_cache_every", "rule": "needs_gpu"}]
            ),
            "memory=max_savings": row(
                effective={"layers_recomputed": 4},
                without_effect=[{"path": "memory.empty_cache_every", "rule": "needs_gpu"}],
            ),
            "attention=flex": {"outcome": "refused", "rules": ["flex_needs_volta"], "with": []},
            "compile=inductor": {"outcome": "timeout", "reason": "not done after 9 s", "with": []},
        },
    ),
    Seen("NVIDIA H200", {}, {"precision=fp32": PLAIN_ROW, "attention=flex": PLAIN_ROW}),
]


@pytest.mark.parametrize(
    ("command", "said", "lines"),
    [
        ("precision=fp32", "ran on CPU, NVIDIA H200", []),
        (
            "memory=checkpointing",
            "ran on CPU",
            [
                "- **On CPU** 4 layers recomputed; peak of tensors 30.0 MiB, of the plain run "
                "40.0 MiB"
            ],
        ),
        (
            "memory=empty_cache",
            "ran on CPU (without effect there)",
            ["- **On CPU** without effect there: [needs gpu](rules.md#needs-gpu)"],
        ),
        (
            "memory=max_savings",
            "ran on CPU",
            [
                "- **On CPU** 4 layers recomputed; without effect there: "
                "[needs gpu](rules.md#needs-gpu)"
            ],
        ),
        (
            "attention=flex",
            "ran on NVIDIA H200",
            ["- **On CPU** refused: [flex needs volta](rules.md#flex-needs-volta)"],
        ),
        (
            "compile=inductor",
            "never seen running",
            ["- **On CPU** timeout: not done after 9 s"],
        ),
        ("peft=lora", "never seen running", []),
    ],
)
def test_description_of_an_option_matches_its_rows(command, said, lines) -> None:
    assert describe(command, SEEN) == said
    assert observations(command, SEEN) == lines


def test_only_full_size_measurements_are_compared_with_guides(tmp_path) -> None:
    full = {
        "outcome": "ok",
        "samples_per_s": 20.123,
        "shared_device": False,
        "stages": {"training": 14949 * 2**20},
    }
    for size in ("small", "full"):
        content = {"size": size, "device": size, "parts": {"memory": {"none": full}}}
        (tmp_path / f"on_gpu_{size}.json").write_text(json.dumps(content))
    (measured,) = read_measured(tmp_path)
    assert (measured.device, cell(measured.rows["none"])) == ("full", "20.12/s, 14949 MB")
    assert cell({**full, "shared_device": True}) == "14949 MB", "others used it: no speed claim"
    assert cell({"outcome": "oom"}) == "oom"
    assert cell(None) == "not measured"
