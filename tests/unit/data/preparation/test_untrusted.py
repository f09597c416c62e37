"""Files of others: one loader, one error, limits for chat templates."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import TemplateError

import eke
from eke.common.errors import ConfigError
from eke.data.preparation import untrusted
from eke.data.preparation.chat import ChatTemplate, Conversation
from eke.data.preparation.lines import BadRowError
from eke.data.preparation.untrusted import LoadError, load, reading, render_apart
from eke.data.sources.request import PrepareRequest, _unexpected_failure

SOURCE = Path(eke.__file__).parent


def test_untrusted_files_are_loaded_in_one_module() -> None:
    found = []
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    for path in (path for path, text in texts.items() if "from_pretrained" in text):
        for node in ast.walk(ast.parse(texts[path])):
            named = isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
            if named or (isinstance(node, ast.Constant) and node.value == "from_pretrained"):
                found.append(path.relative_to(SOURCE).as_posix())
    assert found == ["data/preparation/untrusted.py"]


class Panic(BaseException):
    """As safetensors and tokenizers raise it."""

    __module__ = "pyo3_runtime"


def raising(error: BaseException) -> SimpleNamespace:
    def from_pretrained(source: object, **options: object) -> None:
        raise error

    return SimpleNamespace(from_pretrained=from_pretrained)


@pytest.mark.parametrize(
    "error",
    [OSError("no file"), KeyError("model_type"), Panic("index out of range"), RecursionError("x"),
     AssertionError(), ImportError("sentencepiece")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_library_error_becomes_one_line(error) -> None:
    with pytest.raises(LoadError) as raised:
        load(raising(error), "FOLDER")
    assert raised.value.__cause__ is error
    assert "FOLDER" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.why
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ConfigError([])])
def test_unrelated_errors_are_not_converted(error) -> None:
    with pytest.raises(type(error)):
        load(raising(error), "FOLDER")


def test_prompt_of_a_library_is_not_answered_from_stdin(monkeypatch) -> None:
    typed = SimpleNamespace(readline=lambda *_: "yes\n")
    monkeypatch.setattr(sys, "stdin", typed)
    with pytest.raises(LoadError), reading("FOLDER"):
        input("run its code? ")
    assert sys.stdin is typed


@pytest.mark.slow
def test_library_output_goes_to_stderr(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "class Loud:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'transformers': os.write(1, b'advice of a library')\n"
        "sys.meta_path.insert(0, Loud())\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    request = {"option": "jsonl", "path": "rows", "content": "", "text": "text", "seq_len": 8,
               "train": [["rows", str(tmp_path / "rows.jsonl")]], "max_row_bytes": 99,
               "tokenizer": str(tmp_path)}  # fmt: skip
    paths = f"{SOURCE.parent}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "eke.data.preparation"], input=json.dumps(request), text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert json.loads(done.stdout)["problems"][0]["key"] == "data.tokenizer"
    assert "advice of a library" in done.stderr


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = """{% set ns = namespace(t='x' * 9999) %}
{% for a in range(9) %}{% set ns.t = ns.t * 99 %}{% endfor %}"""
ONE_CALL = "{{ ('a' * 4000000).rfind('ab' + 'a' * 2000000) }}"
"""C code that takes hours and looks for no signal."""


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(untrusted, "RENDER_S", 0.3)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, frozenset(), "default of FOLDER")


ASKED = Conversation([{"role": "user", "content": "a"}])


def test_template_rendering_has_a_memory_limit(quick) -> None:
    with pytest.raises(ConfigError, match="default of FOLDER") as raised:
        template(MEMORY).render(ASKED)
    assert raised.value.problems[0].key == "data.chat_template"
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert template("{{ messages[0]['content'] }}").render(ASKED)[0] == "a"


def test_large_process_still_renders_templates() -> None:
    some = template("{{ (messages[0]['content'] * 99999999) | length }}")
    assert some.render(ASKED)[0] == "99999999"
    held = bytearray(5 << 28)  # more than a rendering may add
    assert some.render(ASKED)[0] == "99999999"
    del held


def test_template_time_limit_is_per_rendering(quick) -> None:
    some = template("{% for a in range(5000) %}{% endfor %}{{ messages[0]['content'] }}")
    started = os.times().user
    while os.times().user < started + 0.7:
        assert some.render(ASKED)[0] == "a"


def test_text_far_longer_than_its_row_is_a_bad_row() -> None:
    with pytest.raises(BadRowError):
        template("{{ 'x' * 20000000 }}").render(ASKED)


APART = {
    "loops": (LOOPS, "processor time"),
    "power": ("{{ 9 ** 99999999 }}", "processor time"),
    "memory": (MEMORY, "memory"),
    "one-call": (ONE_CALL, "processor time"),
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "no-template": ("{% for a in %}", "Expected an expression"),
    "long": ("{{ 'x' * 20000000 }}", "20000000 characters"),
}


def tokenizer(source: str) -> SimpleNamespace:
    return SimpleNamespace(get_chat_template=lambda: source, special_tokens_map={"bos_token": "é"})


@pytest.mark.parametrize("kind", APART)
def test_failed_rendering_process_is_replaced(kind, quick) -> None:
    source, why = APART[kind]
    messages = [{"role": "user", "content": "a\ud800"}]
    with pytest.raises((ValueError, TemplateError), match=why):
        render_apart(messages, tokenizer(source))
    good = tokenizer("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}")
    assert render_apart(messages, good) == "éa\ud800True"


def test_killed_preparation_names_the_template() -> None:
    request = PrepareRequest("chat", "rows", "", tokenizer="FOLDER")
    problem = _unexpected_failure(request, -signal.SIGVTALRM, "")
    assert problem.key == "data.chat_template"
    assert "FOLDER" in problem.value
