"""The schemas in a real YAML language server, over its protocol: what a user of an editor sees.

It runs where `yaml-language-server` is installed (from npm; seen: 1.25.0).
"""

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import REPO

from eke.config.editor import write_schemas

SERVER = shutil.which("yaml-language-server")
pytestmark = [
    pytest.mark.skipif(SERVER is None, reason="yaml-language-server is not installed"),
    pytest.mark.slow,
]

ADAMW = "defaults:\n  - /schema/optimizer/adamw@_here_\n  - _self_\noption: adamw\n"
PRESET = "# @package _global_\n"


class Server:
    """A language server over stdin and stdout, with the settings that `eke schema` prints."""

    def __init__(self, schemas: Path) -> None:
        command = [SERVER, "--stdio"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO
        )
        self.numbers = itertools.count(1)
        self.settings = write_schemas(schemas)
        self.settings |= {"yaml.schemaStore.enable": False, "yaml.validate": True}
        self.settings |= {"yaml.completion": True, "yaml.hover": True}
        self.problems: dict[str, list[dict[str, Any]]] = {}
        completion = {"completionItem": {"snippetSupport": True}}
        self.ask(
            "initialize",
            processId=None,
            rootUri=REPO.as_uri(),
            workspaceFolders=[{"uri": REPO.as_uri(), "name": "eke"}],
            capabilities={
                "textDocument": {
                    "completion": completion,
                    "hover": {"contentFormat": ["markdown"]},
                },
                "workspace": {"configuration": True},
            },
        )
        self.tell("initialized")
        self.tell("workspace/didChangeConfiguration", settings=self.settings)

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def tell(self, method: str, **params: Any) -> None:
        self.send(method=method, params=params)

    def ask(self, method: str, **params: Any) -> Any:
        number = next(self.numbers)
        self.send(id=number, method=method, params=params)
        while True:
            message = self.receive()
            if message.get("id") == number and "method" not in message:
                return message["result"]

    def receive(self) -> dict[str, Any]:
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the server ended"
        message = json.loads(self.process.stdout.read(length))
        if "id" in message and "method" in message:
            self.send(id=message["id"], result=self.answer(message))
        if message.get("method") == "textDocument/publishDiagnostics":
            self.problems[message["params"]["uri"]] = message["params"]["diagnostics"]
        return message

    def answer(self, message: dict[str, Any]) -> Any:
        if message["method"] != "workspace/configuration":
            return None
        sections = [item.get("section", "") + "." for item in message["params"]["items"]]
        return [
            {k.removeprefix(s): v for k, v in self.settings.items() if k.startswith(s)} or None
            for s in sections
        ]

    def open(self, group: str, text: str) -> str:
        """A file that was never there before, so that no earlier answer is taken for its own."""
        name = f"unsaved{next(self.numbers)}.yaml"
        uri = (REPO / "conf" / group / name).as_uri()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.tell("textDocument/didOpen", textDocument=document)
        while uri not in self.problems:
            self.receive()
        return uri

    def at(self, group: str, text: str, question: str) -> Any:
        """Ask at the place marked `|`."""
        before, _, after = text.partition("|")
        uri = self.open(group, before + after)
        lines = before.split("\n")
        position = {"line": len(lines) - 1, "character": len(lines[-1])}
        return self.ask(f"textDocument/{question}", textDocument={"uri": uri}, position=position)

    def completions(self, group: str, text: str) -> dict[str, str]:
        """What would be written for each label that is offered."""
        items = self.at(group, text, "completion")["items"]
        return {i["label"]: i.get("insertText") or i["textEdit"]["newText"] for i in items}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("schemas"))
    yield server
    server.process.kill()
    server.process.communicate()


MISTAKES = [
    pytest.param("optimizer", ADAMW + "momentum: 1\n", 4, "momentum is not allowed", id="key"),
    pytest.param("optimizer", ADAMW + "lr: -1\n", 4, "exclusive minimum of 0", id="limit"),
    pytest.param("precision", "option: a\ntf32: on\n", 1, 'Expected "string"', id="a bare on"),
    pytest.param(
        "recipe", f"{PRESET}defaults:\n  - override /precision: bf17\n", 2, '"bf16"', id="option"
    ),
    pytest.param(
        "sweep",
        f"{PRESET}sweep:\n  rows:\n    one:\n      sead: 1\n",
        4,
        "sead is not allowed",
        id="key of a row",
    ),
]


@pytest.mark.parametrize(("group", "text", "line", "said"), MISTAKES)
def test_mistakes_have_diagnostics(server, group, text, line, said) -> None:
    problems = server.problems[server.open(group, text)]
    assert [p["range"]["start"]["line"] for p in problems] == [line]
    assert said in problems[0]["message"]


def test_valid_file_has_no_editor_diagnostics(server) -> None:
    text = ADAMW + "lr: 1e-3\nbeta1: ${seed}\nweight_decay: 0\n"
    assert server.problems[server.open("optimizer", text)] == []
    text = 'option: a\ncompute: ${oc.env:FORMAT}\ntf32: "on"\n'
    assert server.problems[server.open("precision", text)] == []


def test_keys_complete_with_their_defaults(server) -> None:
    offered = server.completions("optimizer", ADAMW + "be|\n")
    assert offered["beta1"] == "beta1: ${1:0.9}"
    assert "momentum" not in offered


def test_options_complete(server) -> None:
    text = f"{PRESET}defaults:\n  - override /precision: |\n"
    options = sorted(card.stem for card in (REPO / "conf" / "precision").glob("*.yaml"))
    assert list(server.completions("experiment", text)) == options
    offered = server.completions("experiment", f"{PRESET}defaults:\n  - |\n")
    assert offered["override /optimizer"] == "override /optimizer: "


def test_keys_of_a_section_match_chosen_option(server) -> None:
    text = f"{PRESET}defaults:\n  - override /optimizer: sgd\n  - _self_\noptimizer:\n  |\n"
    offered = server.completions("experiment", text)
    assert set(offered) == {"lr", "weight_decay", "momentum", "nesterov"}


@pytest.mark.parametrize(
    "place",
    ["product:\n    |", "zip:\n    |", "rows:\n    one:\n      |"],
    ids=["product", "zip", "row"],
)
def test_sweepable_keys_are_completed(server, place) -> None:
    offered = server.completions("sweep", f"{PRESET}sweep:\n  {place}\n")
    assert {"precision", "optimizer.lr", "train.steps"} <= set(offered)


@pytest.mark.parametrize(
    ("group", "key", "values"),
    [
        pytest.param("precision", "compute", {"float32", "bfloat16", "float16"}, id="enum"),
        pytest.param("dataloader", "persistent", {"true", "false"}, id="switch"),
        pytest.param("precision", "tf32", {"auto", '"on"', '"off"'}, id="words YAML takes"),
        pytest.param(
            "memory", "checkpointing", {'"off"', "full", "selective"}, id="default YAML takes"
        ),
    ],
)
def test_completed_values_are_quoted_correctly(server, group, key, values) -> None:
    written = set(server.completions(group, f"{key}: |\n").values())
    assert values <= written
    assert not {"on", "off"} & written
    for value in written:
        assert server.problems[server.open(group, f"{key}: {value}\n")] == []


def test_variants_are_completed(server) -> None:
    offered = server.completions("optimizer", "defaults: |\n")
    assert "/schema/optimizer/sgd@_here_" in offered["fields of sgd"]


def test_hover_describes_a_key(server) -> None:
    shown = server.at("optimizer", ADAMW + "bet|a1: 0.5\n", "hover")["contents"]["value"]
    assert "Decay of the first moment." in shown
    assert "at least 0 and below 1. Default: 0.9" in shown
