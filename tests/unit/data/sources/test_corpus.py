"""Text sources: what is for training and what for evaluation, how many samples, and their hash."""

import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plan.cases import config_of

from eke.common.errors import ConfigError
from eke.data import sources
from eke.data.sources import FileRange, TextSource, source_files


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """20 files in three subfolders, and one above them."""
    root = tmp_path / "texts"
    for number in range(20):
        path = root / "abc"[number % 3] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number} " * (number + 1))
    (root / "top.txt").write_text("top")
    return root


def places(pieces):
    return [(piece.path, piece.start, piece.size) for piece in pieces]


def test_other_data_has_no_corpus() -> None:
    assert sources.open_corpus(config_of("data=synthetic")) is None


def test_standard_library_is_split_by_file_without_tests() -> None:
    corpus = source_files.standard_library()
    train, evaluation = (
        {piece.path for piece in part} for part in (corpus.train, corpus.evaluation)
    )
    assert not train & evaluation
    assert 0.05 < len(evaluation) / len(train | evaluation) < 0.15
    names = {path.name for path in train | evaluation}
    assert {"dataclasses.py", "pathlib.py"} <= names
    root = Path(sysconfig.get_path("stdlib"))
    folders = {part for path in train | evaluation for part in path.relative_to(root).parts[:-1]}
    assert not folders & source_files._SKIPPED_FOLDERS
    assert corpus == source_files.standard_library.__wrapped__(), "the split is not the same twice"


def test_folder_is_split_by_file(folder) -> None:
    corpus = sources.text_files(folder, "*.txt", 0.2)
    assert len(corpus.train) + len(corpus.evaluation) == 21
    assert len(corpus.evaluation) == 4
    assert not set(places(corpus.train)) & set(places(corpus.evaluation))
    assert all(piece.start == 0 for piece in corpus.pieces())
    assert {piece.label for piece in corpus.pieces()} == {"", "a", "b", "c"}
    assert corpus == sources.text_files(folder, "*.txt", 0.2)


def test_split_is_stable_when_a_file_is_added(folder) -> None:
    before = {piece.path for piece in sources.text_files(folder, "*.txt", 0.2).evaluation}
    (folder / "a" / "new.txt").write_text("new")
    after = {piece.path for piece in sources.text_files(folder, "*.txt", 0.2).evaluation}
    assert len(before & after) >= 3


def test_only_matching_nonempty_files_are_read(folder) -> None:
    (folder / "a" / "notes.md").write_text("notes")
    (folder / "empty.txt").touch()
    assert len(sources.text_files(folder, "*.txt", 0.2).pieces()) == 21
    one = sources.text_files(folder, "*.md", 0.2)
    assert {piece.path.name for piece in one.pieces()} == {"notes.md"}


@pytest.mark.parametrize(
    ("size", "frac", "cut"),
    [(1000, 0.1, 900), (1000, 0.5, 500), (10, 0.001, 9), (7, 0.9, 1), (1, 0.1, 0)],
    ids=["tenth", "half", "at least a byte", "most", "one byte"],
)
def test_end_of_a_single_file_is_evaluation(size, frac, cut, tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * size)
    corpus = sources.text_files(path, "*.txt", frac)
    assert corpus == TextSource((FileRange(path, 0, cut),), (FileRange(path, cut, size - cut),))


def test_folder_with_one_file_equals_the_file(tmp_path) -> None:
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts" / "only.txt"
    path.write_text("x" * 100)
    assert sources.text_files(path.parent, "*.txt", 0.1) == sources.text_files(path, "*", 0.1)


@pytest.mark.parametrize("frac", [0.001, 0.5, 0.9])
def test_two_files_give_one_file_per_split(frac, tmp_path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    corpus = sources.text_files(tmp_path, "*.txt", frac)
    assert (len(corpus.train), len(corpus.evaluation)) == (1, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty.txt", "no text"),
        ("nothing", r"no file that matches '\*\.txt'"),
        ("absent", "no text"),
    ],
    ids=["empty file", "empty folder", "nowhere"],
)
def test_missing_text_is_an_error_with_its_path(name, words, tmp_path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=words) as caught:
        sources.text_files(tmp_path / name, "*.txt", 0.1)
    (problem,) = caught.value.problems
    assert problem.key == "data.path"
    assert problem.value == str(tmp_path / name)


def test_tilde_is_expanded(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    monkeypatch.setenv("HOME", str(tmp_path))
    corpus = sources.open_corpus(config_of("data=text", "data.path='~/a.txt'"))
    assert corpus.train[0].path == tmp_path / "a.txt"


def test_largest_classes_with_evaluation_text_are_used() -> None:
    def piece(label, size):
        return FileRange(Path(label or "single.py"), 0, size, label)

    corpus = TextSource(
        train=(piece("a", 5), piece("b", 50), piece("c", 30), piece("c", 30), piece("", 900)),
        evaluation=(piece("a", 1), piece("c", 1), piece("b", 1), piece("d", 1)),
    )
    assert sources.largest_labels(corpus, 2) == ["c", "b"]
    assert sources.largest_labels(corpus, 9) == ["c", "b", "a"], "d has nothing to train on"


def classify(path: object, num_labels: int):
    return config_of(
        "data=text",
        f"data.path={path}",
        "data.eval_frac=0.6",
        "task=sequence_classification",
        f"task.num_labels={num_labels}",
    )


def test_text_classes_are_folders(folder) -> None:
    corpus = sources.open_corpus(classify(folder, 3))
    assert {piece.label for piece in corpus.pieces()} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("part", "num_labels", "fix"),
    [("", 5, "task.num_labels=3"), ("a", 2, "data.path=FOLDER_OF_FOLDERS")],
    ids=["three folders", "no folders"],
)
def test_more_classes_than_folders_are_rejected(part, num_labels, fix, folder) -> None:
    with pytest.raises(ConfigError, match=r"folders \(classes\)") as caught:
        sources.open_corpus(classify(folder / part, num_labels))
    assert str(caught.value.problems[0].fix) == fix


def test_evaluation_share_that_covers_all_folders_is_proposed(tmp_path) -> None:
    for n in range(8):
        (tmp_path / "ab"[n % 2]).mkdir(exist_ok=True)
        (tmp_path / "ab"[n % 2] / f"{n}.txt").write_text("text " * 50)
    typed = ("data=text", f"data.path={tmp_path}", "task=sequence_classification")
    for num_labels in (2, 5):
        with pytest.raises(ConfigError, match="only 1 folders") as caught:
            sources.open_corpus(config_of(*typed, f"task.num_labels={num_labels}"))
        fix = str(caught.value.problems[0].fix).split()
        assert fix[-1].startswith("data.eval_frac=0.")
        corpus = sources.open_corpus(config_of(*typed, *fix))
        assert {piece.label for piece in corpus.evaluation} == {"a", "b"}


def test_windows_are_counted_class_by_class() -> None:
    pieces = [
        FileRange(Path("a"), 0, size, label) for size, label in ((9, "x"), (9, "x"), (15, "y"))
    ]
    assert sources.count_windows(pieces, 8) == 20 // 8 + 16 // 8
    assert sources.count_windows(pieces, 100) == 0
    assert sources.count_windows([], 8) == 0


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.sampled_from("xy")), max_size=6),
    length=st.integers(4, 40),
)
def test_packed_windows_match_the_count(sizes, length, tmp_path_factory) -> None:
    from eke.training.batches.sampler import pack_windows

    folder = tmp_path_factory.mktemp("pieces")
    pieces = []
    for number, (size, label) in enumerate(sizes):
        path = folder / str(number)
        path.write_bytes(os.urandom(size))
        pieces.append(FileRange(path, 0, size, label))
    windows = pack_windows(tuple(pieces), length, ["x", "y"])
    assert len(windows) == sources.count_windows(pieces, length)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        (("task=causal_lm", "data.seq_len=24"), 24),
        (("task=seq2seq_lm", "model=tiny_t5", "data.seq_len=24"), 48),
        (("task=seq2seq_lm", "model=tiny_t5", "data.seq_len=24", "task.target_len=8"), 32),
    ],
    ids=["causal", "open target", "short target"],
)
def test_sample_has_its_source_and_target(overrides, length) -> None:
    assert sources.window_length(config_of(*overrides)) == length


def test_fingerprint_covers_content_names_classes_and_split(folder) -> None:
    def fingerprint(frac: float = 0.2) -> str:
        return sources.fingerprint(sources.text_files(folder, "*.txt", frac))

    before = fingerprint()
    assert len(before) == 16
    for path in folder.rglob("*.txt"):
        os.utime(path, ns=(1, 1))
    assert fingerprint() == before, "the time alone changed"
    found = [before, fingerprint(0.5)]
    for change in (
        lambda: (folder / "top.txt").write_text("pot"),
        lambda: (folder / "top.txt").rename(folder / "moved.txt"),
        lambda: (folder / "b" / "1.txt").rename(folder / "a" / "1.txt"),
        lambda: (folder / "moved.txt").unlink(),
    ):
        change()
        found.append(fingerprint())
    assert len(set(found)) == 6
    halves = [sources.text_files(folder / "a" / "1.txt", "*", frac) for frac in (0.1, 0.5)]
    assert sources.fingerprint(halves[0]) != sources.fingerprint(halves[1])


def test_cached_fingerprint_reads_no_text(folder, monkeypatch) -> None:
    corpus = sources.text_files(folder, "*.txt", 0.2)
    before = sources.fingerprint(corpus)
    monkeypatch.setattr(
        "eke.data.sources.source_files.content_hash", lambda parts: pytest.fail("read again")
    )
    assert sources.fingerprint(corpus) == before


HASHES = [
    pytest.param(lambda path: sources.fingerprint(sources.text_files(path, "*", 0.5)), id="text"),
    pytest.param(lambda path: sources.files_digest([(path.name, path)]), id="rows"),
]


@pytest.mark.parametrize("digest", HASHES)
def test_changed_file_with_equal_size_and_time_is_detected(digest, folder) -> None:
    path = folder / "top.txt"
    before, found = digest(path), path.stat()
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_size == found.st_size
    assert digest(path) != before


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"0123", b"g" * 16, b"0" * 17])
@pytest.mark.parametrize("digest", HASHES)
def test_damaged_cached_hash_is_recomputed(digest, damaged, folder) -> None:
    expected = digest(folder / "top.txt")
    (kept,) = (sources.cache_folder() / "fingerprints").iterdir()
    kept.write_bytes(damaged)
    assert digest(folder / "top.txt") == expected
    assert kept.read_text() == expected


def test_unwritable_cache_is_ignored(folder, tmp_path, monkeypatch) -> None:
    corpus = sources.text_files(folder, "*.txt", 0.2)
    expected = sources.fingerprint(corpus)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert sources.fingerprint(corpus) == expected


def test_cache_location_follows_xdg(tmp_path, monkeypatch) -> None:
    assert sources.cache_folder() == tmp_path / "cache" / "eke"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert sources.cache_folder() == tmp_path / "home" / ".cache" / "eke"


def test_text_is_read_once_for_many_plans(folder, monkeypatch) -> None:
    config = config_of("data=text", f"data.path={folder}")
    looked = []
    stat = Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda path, **more: looked.append(path) or stat(path, **more)
    )
    with sources.memoize_file_reads():
        answers = []
        for _ in range(3):
            corpus = sources.open_corpus(config)
            answers.append((corpus, sources.fingerprint(corpus)))
            looked.append("then")
    assert answers[0] == answers[1] == answers[2]
    first = looked.index("then")
    assert first > 20, "every file of the folder"
    assert [path for path in looked[first:] if str(path).endswith("0.txt")] == []
    (folder / "a" / "0.txt").write_text("other")
    assert sources.fingerprint(sources.open_corpus(config)) != answers[0][1], "and again after it"


def test_file_names_with_invalid_bytes_are_printable_labels(tmp_path) -> None:
    for label in (b"l\xff", b"m"):
        os.mkdir(os.path.join(os.fsencode(tmp_path), label))
        for name in (b"a.txt", b"b\xfe.txt"):
            Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), label, name))).write_text("text")
    corpus = sources.text_files(tmp_path, "*.txt", 0.5)
    assert len(sources.fingerprint(corpus)) == 16
    assert {piece.label for piece in corpus.pieces()} == {"l\\xff", "m"}
