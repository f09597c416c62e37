"""How each rule is shown to be needed: what happens to a run, or a library, without it.

A rule that a new version of a library makes wrong fails its test here.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from unit.rules.test_without_effect import SAME


class Kind(Enum):
    """What the test sees."""

    fails = "without it the run fails"
    wrong = "without it another run than the configured one is trained"
    same = "the run is bit-identical with and without the setting"
    refusal = "the library's own check or table says so"
    numbers = "its numbers, counted or measured"
    gpu = "a test that needs a GPU: `make test-gpu`"
    nowhere = "by no test"


@dataclass(frozen=True)
class Shown:
    """The test of one rule."""

    kind: Kind
    test: str = ""
    """File below `tests`, `::`, function; empty where there is none."""
    reason: str = ""
    """Why there is none, or why it shows less than the rule says."""


REPLAYED = "PyTorch's own conditions; the failure itself: tests/gpu/test_gpu_refusals.py"
NOTES = {
    "liger_needs_known_family": "with a stand-in for liger-kernel, which needs triton",
    "graphs_take_one_micro_batch": REPLAYED,
    "graphs_take_the_whole_model": REPLAYED,
    "lr_far_off": "the published values; what another does to a model was not seen",
    "selective_is_written_over": "with a stand-in for Liger's kernel, which writes as it does",
}
"""Rule -> what its test leaves open."""

ROWS = [
    line.split(maxsplit=2)
    for line in Path(__file__).with_name("necessity.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

FAILS = {rule: words for rule, kind, words in ROWS if kind == "error"}
"""Rule -> words of the error that ends the run of its case, with all other rules asked."""


def _shown(rule: str, kind: str, text: str) -> Shown:
    if kind == "error":
        breaking = "unit/rules/test_necessity.py::test_run_fails_if_the_rule_is_disabled"
        return Shown(Kind.fails, breaking)
    if kind == "nowhere":
        return Shown(Kind.nowhere, "", text)
    return Shown(Kind[kind], text, NOTES.get(rule, ""))


SHOWN = {rule: _shown(rule, kind, text) for rule, kind, text in ROWS} | dict.fromkeys(
    SAME,
    Shown(
        Kind.same,
        "unit/rules/test_without_effect.py::test_setting_without_effect_keeps_the_run_bit_exact",
    ),
)
"""Every rule; docs/reference/rules.md says so of each."""
