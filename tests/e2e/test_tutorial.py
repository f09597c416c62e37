"""The tutorials with one's own files, typed as they stand there, on files made here."""

import json
import os
import random
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from chat_templates import FAMILIES, saved
from checkpoints import save_checkpoint
from forked_workers import run
from live import Live, record_of, rows_of, run_in
from prepared import write_jsonl
from support import REPO, Finished
from tokenizers.decoders import ByteLevel
from unit.results.trackers.stub import serving

AFTERNOON, CLASSIFY = (
    (REPO / "docs" / "tutorial" / f"{name}.md").read_text() for name in ("afternoon", "classify")
)


def unfenced(page: str) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)


def commands(section: str, page: str = AFTERNOON) -> list[str]:
    """The indented lines of a section."""
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", unfenced(page), re.M | re.S)
    assert body, section
    return [line.strip() for line in body[1].splitlines() if line.startswith("    ")]


def fenced(language: str, page: str = AFTERNOON) -> str:
    """The one block of this language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)
    return str(block)


@pytest.fixture
def afternoon(tmp_path: Path) -> Path:
    """The user's folder: conversations, and a checkpoint with a tokenizer and a chat template."""
    family = FAMILIES["chatml"]
    loaded = saved(family, tmp_path / "my_model")
    loaded.backend_tokenizer.decoder = ByteLevel()
    loaded.save_pretrained(tmp_path / "my_model")
    save_checkpoint(tmp_path / "my_model", "llama", vocab_size=330)
    shown, chance, rows = json.loads(fenced("json")), random.Random(0), []
    for _ in range(160):
        a, b = chance.randint(0, 9), chance.randint(0, 9)
        texts = (f"what is {a} plus {b}?", f"it is {a + b}")
        pairs = zip(shown["messages"], texts, strict=True)
        rows.append({"messages": [{**message, "content": text} for message, text in pairs]})
    write_jsonl(tmp_path / "chats.jsonl", [shown, *rows])
    option = tmp_path / "my_conf" / "experiment" / "chat.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(fenced("yaml"))
    return tmp_path


def typed(folder: Path, command: str, **variables: str) -> Finished:
    """One line of the tutorial, in a fork with torch imported: see forked_workers.py."""
    match shlex.split(command):
        case ["eke", *words]:
            return run(folder, *words, **variables)
        case ["python", "train.py", *words]:
            return run(folder, "train", *words, **variables)
    return in_shell(folder, command, **variables)


def in_shell(folder: Path, command: str, **variables: str) -> Finished:
    """One line of the tutorial, in a shell: a process that imports for itself."""
    programs = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; '
    programs += 'eke() { python -m eke "$@"; }; '
    line = command.replace("train.py", str(REPO / "train.py"))
    return run_in(folder, ["bash", "-c", programs + line], **variables)


@pytest.mark.slow
def test_tutorial_commands_run(afternoon: Path) -> None:
    (show,) = commands("Look at the data")
    looked = typed(afternoon, show)
    assert looked.code == 0, looked.text
    assert fenced("text") in looked.out

    (plan,) = commands("Plan")
    planned = typed(afternoon, plan)
    assert planned.code == 0, planned.text
    told = ("learning rate", "usual for LoRA", "fits  ")
    for what in told:
        assert what in planned.out, what
    assert not (afternoon / "runs").exists()

    run = train(afternoon)
    compare(afternoon)
    try_out(afternoon, run)
    export(afternoon, run)
    (sync,) = commands("Show it to others")
    sync_all(afternoon, sync, run)


def train(afternoon: Path) -> Path:
    """Interrupted, continued, answered; the folder of the run that the summary names."""
    first, watch, again = commands("Train an adapter")
    live = Live(afternoon, tuple(shlex.split(first)[2:]))
    live.wait_for_step(5)
    seen = typed(afternoon, watch)
    assert seen.code == 0, seen.text
    assert "train/global_step" in seen.out
    live.signal(signal.SIGINT)  # Ctrl-C
    said = live.finish()
    assert live.process.returncode == 75, said
    assert again == first
    finished = typed(afternoon, again)
    assert finished.code == 0, finished.text
    (run,) = re.findall(r"^  saved +(runs/\w+)$", finished.out, re.M)
    record = record_of(afternoon / run)
    assert (record["outcome"], record["attempt"]) == ("ok", 1)
    assert record["loss"]["eval_final"] < record["loss"]["eval_start"]
    assert "(recorded " in typed(afternoon, again).out
    return afternoon / run


def compare(afternoon: Path) -> None:
    """Two settings run, the third is the run that is there."""
    sweep, report = commands("Compare three settings")
    ran = typed(afternoon, sweep)
    assert ran.code == 0, ran.text
    assert ran.text.count("] ok in ") == 2
    compared = typed(afternoon, report)
    assert compared.code == 0, compared.text
    assert "3 runs of 3 configurations: 3 ok" in compared.out
    for setting in ("lora", "qlora"):
        assert re.search(rf"^{setting}\b.*MiB", compared.out, re.M), compared.out
    assert len(re.findall(r"^.* samples/s.* MiB", compared.out, re.M)) == 3
    assert (afternoon / "runs" / "report.html").is_file()


def try_out(afternoon: Path, run: Path) -> None:
    """Evaluated on other conversations, and asked."""
    rows = (afternoon / "chats.jsonl").read_text().splitlines()
    (afternoon / "held_out.jsonl").write_text("\n".join(rows[:30]))
    evaluate, generate = (
        command.replace("runs/ID", f"runs/{run.name}")
        for command in commands("Evaluate and try it")
    )
    done = typed(afternoon, evaluate)
    assert done.code == 0, done.text
    assert "30 samples" in done.out
    assert re.search(r"^  token_accuracy +0\.\d+$", done.out, re.M), done.out
    answered = in_shell(afternoon, generate)
    assert answered.code == 0, answered.text
    assert "<|im_" not in answered.out


def export(afternoon: Path, run: Path) -> None:
    """Plain transformers, with no peft to import, chats with what was trained."""
    (command,) = commands("Take the model with you")
    done = in_shell(afternoon, command.replace("runs/ID", f"runs/{run.name}"))
    assert done.code == 0, done.text
    assert "model with its adapters merged" in done.out
    card = (afternoon / "my_chat" / "README.md").read_text()
    assert f"{record_of(run)['loss']['eval_final']:.5g}" in card
    without_peft = "import sys; sys.modules['peft'] = None\n"
    (afternoon / "use.py").write_text(without_peft + fenced("python"))
    used = typed(afternoon, "python use.py")
    assert used.code == 0, used.text
    assert used.out.strip()
    assert "<|im_" not in used.out


def sync_all(afternoon: Path, command: str, run: Path) -> None:
    """Three runs reach a server on this machine, as the page's table says; a second time none."""
    shown = re.findall(
        r"^\| (?!Weights|---).*? \| (.*) \|$", AFTERNOON.split("## Show it")[1], re.M
    )
    curves, times, settings, results = (re.findall(r"`([\w/]+)`", row) for row in shown)
    with serving() as server:
        account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40}
        synced = typed(afternoon, command, **account)
        assert synced.code == 0, synced.text
        assert len(list((afternoon / "runs").glob("*/sync.json"))) == 3
        assert set(server.runs) == {p.parent.name for p in afternoon.glob("runs/*/record.json")}
        rows, summary = server.rows[run.name], server.summaries[run.name]
        assert {*curves, *times} <= {key for row in rows for key in row}
        assert set(settings) <= set(json.loads(server.runs[run.name]["config"]))
        assert set(results) <= set(summary)
        assert len({row["train/global_step"] for row in rows}) == len(
            {row["train/global_step"] for row in rows_of(run)}
        )
        sent = [path for path in server.requests if "file_stream" in path]
        assert sent
        assert typed(afternoon, command, **account).code == 0
        assert [path for path in server.requests if "file_stream" in path] == sent, "sent twice"


@pytest.mark.parametrize(("page", "number"), [(AFTERNOON, 11), (CLASSIFY, 7)], ids=["chat", "csv"])
def test_every_command_is_explicit_somewhere(page, number) -> None:
    """A command that is added to the page without a place in the test fails here."""
    lines = [line for line in unfenced(page).splitlines() if line.startswith("    ")]
    assert len(lines) == number, lines


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    """The user's folder: texts of three classes, and an encoder with a tokenizer."""
    save_checkpoint(tmp_path / "my_encoder", "bert", tokenizer=True)
    words = {"late": "parcel weeks", "broken": "lid cracked", "fine": "works should"}
    chance, lines = random.Random(0), fenced("csv", CLASSIFY).splitlines()
    for _ in range(300):
        (label,) = chance.choices(list(words), [5, 3, 1])
        lines.append(f"{' '.join(chance.choices(words[label].split(), k=4))},{label}")
    (tmp_path / "tickets.csv").write_text("\n".join(lines))
    option = tmp_path / "my_conf" / "experiment" / "tickets.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(fenced("yaml", CLASSIFY))
    return tmp_path


def check_shown(name: str, output: str) -> None:
    """Compare a block of the page with an output: words exactly, numbers roughly.

    With EKE_UPDATE, write it instead.
    """
    page = REPO / "docs" / "tutorial" / "classify.md"
    pattern = rf"<!-- {name} -->\n```text\n(.*?)```\n<!-- /{name} -->"
    shown = re.search(pattern, page.read_text(), re.S)
    assert shown
    if os.environ.get("EKE_UPDATE"):
        text = page.read_text()
        page.write_text(text[: shown.start(1)] + output.rstrip() + "\n" + text[shown.end(1) :])
        return
    words = re.sub(r"[\d.:]+", " ", shown[1]).split()
    assert words == re.sub(r"[\d.:]+", " ", output).split()
    if accuracy := re.search(r"accuracy ([\d.]+)", shown[1]):
        assert float(accuracy[1]) >= 0.8, "the page shows a classifier that has learned"


@pytest.mark.slow
def test_texts_are_sorted_into_classes(tickets: Path) -> None:
    (show,) = commands("Look at the data", CLASSIFY)
    assert "class late" in typed(tickets, show).text
    assert (
        "has 3 different labels"
        in typed(tickets, show.replace("num_labels=3", "num_labels=2")).text
    )
    (plan,) = commands("Save the overrides", CLASSIFY)
    assert "broken=0 fine=1 late=2" in typed(tickets, plan).text
    (train,) = commands("Train", CLASSIFY)
    trained = typed(tickets, train)
    assert trained.code == 0, trained.text
    line = re.findall(
        r"^eval  step \d+  loss [\d.]+  accuracy [\d.]+  macro F1 [\d.]+.*$", trained.text, re.M
    )[-1]
    check_shown("evaluation", line)
    sweep, report = commands("Compare", CLASSIFY)
    assert typed(tickets, sweep).code == 0
    compared = typed(tickets, f"{report} --provenance")
    assert compared.code == 0, compared.text
    assert re.search(
        r"true class( +predicted (broken|fine|late)){3} +precision +recall +f1", compared.text
    )
    tables = re.findall(r"^Classes: .*\n(?:  .*\n?)+", compared.out, re.M)
    check_shown(
        "classes", next(table for table in tables if not table.startswith("Classes: lr=0.0005"))
    )
    records = [json.loads(path.read_text()) for path in (tickets / "runs").glob("*/record.json")]
    best = max(records, key=lambda record: record["metrics"]["accuracy"])
    assert best["metrics"]["accuracy"] > 0.9, "each class has words of its own"
    counted = best["classes"]["confusion"]
    right = sum(counted[n][n] for n in range(3)) / sum(map(sum, counted))
    assert right == pytest.approx(best["metrics"]["accuracy"])
    evaluate, export = commands("Use it", CLASSIFY)
    rows = (tickets / "tickets.csv").read_text().splitlines()
    (tickets / "held_out.csv").write_text("\n".join(rows[:40]))
    evaluated = in_shell(tickets, evaluate.replace("RUN", f"runs/{best['run_id']}"))
    assert "39 samples" in evaluated.out, evaluated.text
    assert re.search(r"^  broken( +[01]\.\d{4}){3} +\d+$", evaluated.out, re.M), evaluated.out
    assert typed(tickets, export.replace("RUN", f"runs/{best['run_id']}")).code == 0
    assert "accuracy" in (tickets / "my_classifier" / "README.md").read_text()
    answer = run_in(tickets, [sys.executable, "-c", fenced("python", CLASSIFY)])
    assert "'label': 'broken'" in answer.out, answer.err
