"""What is offered for an unfinished command line."""

import pytest

from eke.common.errors import ConfigError
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.completion import answer_shell, candidates, split_line

CATALOGUE = make_catalogue()


def offered(line: str) -> list[str]:
    return candidates(*split_line(line))


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        pytest.param("", ([], ""), id="empty"),
        pytest.param("eke 'a b", (["eke", "a"], "b"), id="open quote"),
        pytest.param(r"eke a\ b", (["eke"], "a b"), id="escaped space"),
        pytest.param("eke a\\ ", (["eke"], "a "), id="escaped space at the end"),
        pytest.param("eke a\\", (["eke"], "a"), id="lone backslash"),
    ],
)
def test_command_line_is_split_like_a_shell(line, parts) -> None:
    assert split_line(line) == parts


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        pytest.param("mod", ["model=", "model."], id="group and section"),
        pytest.param("trai", ["trainer.", "train."], id="section that is no group"),
        pytest.param("plan", ["plan_only="], id="root key"),
        pytest.param("schedule=w", ["schedule=wsd"], id="option"),
        pytest.param("memory.e", ["memory.every_n=", "memory.empty_cache_every="], id="keys"),
        pytest.param("rerun=", ["rerun=true", "rerun=false"], id="switch"),
        pytest.param("tracker.mode=o", ["tracker.mode=offline", "tracker.mode=online"], id="enum"),
        pytest.param("train.steps=", [], id="a number has no list"),
        pytest.param("batch.option=", [], id="only a file sets it"),
        pytest.param("batch.opt", [], id="nor is it offered"),
        pytest.param("optimizer=sgd optimizer.n", ["optimizer.nesterov="], id="of the option"),
        pytest.param("optimizer=sgd optimizer.b", [], id="not of another"),
        pytest.param("recipe=guide_best optimizer.ne", ["optimizer.nesterov="], id="a recipe's"),
        pytest.param("-m optimizer=sgd,adamw optimizer.n", ["optimizer.nesterov="], id="of either"),
        pytest.param("seed=1 see", [], id="typed already"),
        pytest.param(
            "-m precision=fp32,f",
            ["precision=fp32,fp16", "precision=fp32,fp8"],
            id="next of several",
        ),
        pytest.param("precision=fp32,f", [], id="several without -m"),
        pytest.param("--mu", ["--multirun"], id="flag"),
        pytest.param("--js", ["--json"], id="flag of all commands"),
        pytest.param("--color ", ["auto", "always", "never"], id="colours"),
        pytest.param("--help optimizer=mu", ["optimizer=muon"], id="topic of help"),
        pytest.param("--help al", ["all"], id="topic with all keys"),
        pytest.param("--cfg ", ["job", "hydra", "all"], id="value of a flag"),
        pytest.param("nonsense=1 wrong precison.x", [], id="wrong words"),
        pytest.param("--config-dir /no/where sched", ["schedule=", "schedule."], id="no folder"),
    ],
)
def test_completion_candidates(line, wanted) -> None:
    assert offered(line) == wanted


def test_every_completion_is_continued_or_complete() -> None:
    """Each group's options, and each key of each section, are reached from the first TAB."""
    reached = set()
    for start in offered(""):
        more = offered(start)
        assert all(text.startswith(start) for text in more)
        reached |= {start, *more}
    options = {f"{g}={o}" for g, names in CATALOGUE.options.items() for o in names}
    assert options <= reached
    assert "train.max_grad_norm=" in reached


def test_user_options_are_completed(tmp_path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("# optimizer=mine -- my own.\n")
    assert offered(f"--config-dir {tmp_path} optimizer=mi") == ["optimizer=mine"]
    assert offered(f"-cd={tmp_path} optimizer=mi") == ["optimizer=mine"]


def test_files_are_completed(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "a b.txt").write_text("")
    (tmp_path / ".hidden").write_text("")
    assert offered("data.path=") == ["data.path=deep/"]
    assert offered("data.path=deep/") == ["data.path=deep/a b.txt", "data.path=deep/er/"]
    assert offered("data.path=.h") == ["data.path=.hidden"]
    assert offered("--config-dir deep/") == ["deep/er/"]
    assert offered("data.path=no/where/") == []
    assert offered(f"paths.runs={tmp_path}/de") == [f"paths.runs={tmp_path}/deep/"]


# --- what a shell is told -------------------------------------------------------------------------


def test_bash_completion_respects_word_breaks(monkeypatch) -> None:
    monkeypatch.setenv("COMP_LINE", "python train.py tracker.mode=on")
    assert answer_shell(["query=bash"]) == "tracker.mode=online\n"
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'><=;|&(:")
    assert answer_shell(["query=bash"]) == "online\n"
    assert answer_shell(["query=zsh"]) == "tracker.mode=online\n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        pytest.param("eke ", ["train", "sync"], id="commands"),
        pytest.param("/usr/bin/eke s", ["sync"], id="one command"),
        pytest.param("eke train schedule=w", ["schedule=wsd"], id="overrides"),
        pytest.param("eke data show schedule=w", ["schedule=wsd"], id="overrides of rows"),
        pytest.param("python -m eke train schedule=w", ["schedule=wsd"], id="as a module"),
        pytest.param("eke sync see", [], id="no overrides of other commands"),
    ],
)
def test_commands_are_completed(line, wanted, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", line)
    answer = answer_shell(["query=zsh"], ("train", "sync"))
    assert answer.split() == wanted


@pytest.mark.parametrize(
    ("request_", "fix"),
    [
        pytest.param([], "-sc install=bash", id="nothing"),
        pytest.param(["insert=zsh"], "-sc install=bash", id="action"),
        pytest.param(["install=fsh"], "-sc install=fish", id="shell"),
    ],
)
def test_invalid_completion_requests(request_, fix) -> None:
    with pytest.raises(ConfigError) as caught:
        answer_shell(request_)
    assert str(caught.value.problems[0].fix) == fix
