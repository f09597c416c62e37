"""What a worker reads is what was planned: another content is refused, a touched file is not."""

import dataclasses
import os
import shutil

import pytest
from unit.plan.cases import config_of, plan_config, plan_of

from eke.common.errors import ChangedError
from eke.common.paths import RunPaths
from eke.data.sources import FileRange, TextSource, source_files
from eke.plan.planner import check_inputs, read_plan, write_plan
from eke.plan.planner.inputs import inputs_of

SHORT = ("data.seq_len=16", "batch.per_device=2", "train.steps=2")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Hashes are kept where no other test looks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcdefgh" * 200)
    return path


@pytest.fixture
def folder(tmp_path):
    """Two classes of three files."""
    for label in ("one", "two"):
        for number in range(3):
            path = tmp_path / "texts" / label / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{label} {number} " * 50)
    return tmp_path / "texts"


def same_size(path) -> None:
    path.write_bytes(b"01234567" * 200)


def same_times(path) -> None:
    before = path.stat()
    same_size(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path) -> None:
    other = path.with_name("new")
    same_size(other)
    os.replace(other, path)


def by_a_link(path) -> None:
    path.rename(path.with_name("elsewhere"))
    same_size(path.with_name("other"))
    path.symlink_to("other")


CHANGES = {
    "the same size": same_size,
    "the same size and time": same_times,
    "replaced": replaced,
    "by a link": by_a_link,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:900]),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_text_is_rejected(text, change) -> None:
    plan = plan_of("data=text", f"data.path={text}", *SHORT)
    check_inputs(plan)
    change(text)
    with pytest.raises(ChangedError, match=f"^data.path = {text}.*repeat the command$") as told:
        check_inputs(plan)
    assert told.value.exit_code == 2
    assert "\n" not in str(told.value)


def rewritten(path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def through_a_link(path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


SAME = {
    "touched": lambda path: os.utime(path),
    "other rights": lambda path: path.chmod(0o400),
    "written again": rewritten,
    "moved behind a link": through_a_link,
    "a link more": lambda path: os.link(path, path.with_name("link")),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_same_content_is_accepted(text, change) -> None:
    plan = plan_of("data=text", f"data.path={text}", *SHORT)
    change(text)
    check_inputs(plan)


IN_A_FOLDER = {
    "edited": lambda f: (f / "one" / "0.txt").write_text("other 0 " * 50),
    "one more": lambda f: (f / "one" / "new.txt").write_text("more"),
    "one less": lambda f: (f / "two" / "1.txt").unlink(),
    "another class": lambda f: shutil.move(f / "one" / "0.txt", f / "two" / "9.txt"),
    "a link to another folder": lambda f: (shutil.move(f / "one", f / "x"), (f / "one").mkdir()),
}


@pytest.mark.parametrize("change", IN_A_FOLDER.values(), ids=IN_A_FOLDER)
def test_changed_folder_of_texts_is_rejected(folder, change) -> None:
    plan = plan_of("data=text", f"data.path={folder}", *SHORT)
    change(folder)
    with pytest.raises(ChangedError, match="its content has changed"):
        check_inputs(plan)


def test_standard_library_of_another_python_is_rejected(text, monkeypatch) -> None:
    library = TextSource((FileRange(text, 0, 1000),), (FileRange(text, 1000, 600),))
    monkeypatch.setattr(source_files, "standard_library", lambda: library)
    plan = plan_of("data=python_source", *SHORT)
    check_inputs(plan)
    same_size(text)
    with pytest.raises(ChangedError, match=r"data = python_source: .* the Python that trains"):
        check_inputs(plan)


TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "source.spm", "bpe.codes",
    "additional_chat_templates/tool.jinja",
)  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_is_always_checked(tmp_path, name) -> None:
    file = tmp_path / "tokenizer" / name
    for each in (file, tmp_path / "tokenizer" / "tokenizer.json"):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("before")
    config = config_of("data=jsonl", f"data.tokenizer={tmp_path / 'tokenizer'}")
    plan = dataclasses.replace(plan_of("data=synthetic"), config=config)
    plan = dataclasses.replace(plan, inputs=inputs_of(config, ""))
    os.utime(file)
    (tmp_path / "tokenizer" / "README.md").write_text("read by nobody")
    check_inputs(plan)
    file.write_text("after!")
    with pytest.raises(ChangedError, match=r"^data\.tokenizer = .*tokenizer: its content"):
        check_inputs(plan)
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(ChangedError):
        check_inputs(plan)


def test_every_tokenizer_file_is_checked() -> None:
    """By the names in the classes' own source, which importing all of would take a minute."""
    import importlib.util
    import re
    from pathlib import Path

    from eke.data.sources.request import TOKENIZER_FILES

    root = Path(importlib.util.find_spec("transformers").submodule_search_locations[0])
    tables = re.compile(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", re.DOTALL)
    names = {
        name
        for file in root.glob("models/*/tokenization_*.py")
        for table in tables.findall(file.read_text())
        for name in re.findall(r':\s*"([^"]+)"', table)
    }
    assert len(names) > 10
    missed = {n for n in names if not n.startswith(TOKENIZER_FILES) and not n.endswith(".model")}
    assert not missed


def test_tokenized_text_classes_are_numbered_by_files(folder, monkeypatch) -> None:
    """Their tokens are prepared, and still the sizes of the folders name the classes."""
    config = config_of("data=text", f"data.path={folder}", f"data.tokenizer={folder}",
                       "task=sequence_classification", "task.num_labels=2",
                       "data.eval_frac=0.5")  # fmt: skip
    plan = dataclasses.replace(plan_of("data=synthetic"), config=config)
    plan = dataclasses.replace(plan, inputs=inputs_of(config, "tokens"))
    check_inputs(plan)
    (folder / "two" / "0.txt").write_text("two 0 " * 500)
    with pytest.raises(ChangedError, match=r"^data\.path"):
        check_inputs(plan)
    plain = config_of("data=text", f"data.path={folder}", f"data.tokenizer={folder}")
    assert "data.path" not in inputs_of(plain, "tokens"), "nothing of the files is read"


def test_inputs_round_trip_and_random_data_has_no_inputs(text, tmp_path) -> None:
    plan = plan_config(config_of("data=text", f"data.path={text}", *SHORT))
    assert plan.inputs == {"data.path": plan.data_fingerprint}
    paths = RunPaths(tmp_path)
    write_plan(paths, plan)
    assert read_plan(paths).inputs == plan.inputs
    assert plan_of("data=synthetic").inputs == {}
