"""`eke report`: the command line."""

import errno
import json
import os
import subprocess
import sys

import pytest
from support import environment
from unit.results.report.made import Run, make_sweep

from eke.cli import main, report


@pytest.fixture
def sweep(tmp_path):
    runs = [Run({"precision": p}, repeat=r, speed=s) for r in range(3)
            for p, s in (("fp32", 100.0 + r), ("bf16", 200.0 + r))]  # fmt: skip
    return make_sweep(tmp_path / "runs", runs)


def test_report_is_printed_and_written_to_the_sweep(sweep, capsys):
    assert main(["report", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("bf16 is fastest")
    assert out.endswith("report.html, report.md, report.json, report.csv\n")
    names = {path.name for path in sweep.iterdir()}
    assert names == {"sweep.json", "report.html", "report.md", "report.json", "report.csv"}


def test_report_files_are_not_read_as_runs(sweep, capsys):
    assert main(["report", str(sweep.parent)]) == 0
    first = (sweep.parent / "report.json").read_text()
    assert main(["report", str(sweep.parent), "--quiet"]) == 0
    assert (sweep.parent / "report.json").read_text() == first


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--formats", "csv,json"], {"report.csv", "report.json"}),
        (["--formats", "none"], set()),
    ],
)
def test_report_writes_only_requested_files(sweep, tmp_path, options, names, capsys):
    target = tmp_path / "out" / "deep"
    assert main(["report", str(sweep), "--output", str(target), *options]) == 0
    assert {path.name for path in target.iterdir()} == names
    assert capsys.readouterr().out.splitlines()[1].startswith("bf16 is fastest")


def test_full_provenance_is_shown_on_request(sweep, capsys):
    assert main(["report", str(sweep), "--formats", "none"]) == 0
    short = capsys.readouterr().out
    assert main(["report", str(sweep), "--formats", "none", "--provenance"]) == 0
    text = capsys.readouterr().out
    assert "step clock" in text
    assert "step clock" not in short


def test_options_reach_the_comparison(sweep, capsys):
    options = ["--baseline", "precision=bf16", "--by", "precision", "--formats", "json", "--quiet"]
    assert main(["report", str(sweep), *options]) == 0
    found = json.loads((sweep / "report.json").read_text())
    assert found["machines"][0]["baseline"] == "bf16"
    assert [e["value"] for e in found["machines"][0]["effects"]] == ["fp32"]
    assert "fastest" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "no such folder"),
        (["{sweep}", "--baseline", "precision=fp8"], "--baseline"),
        (["{sweep}", "--by", "optimizer"], "differing: precision"),
        (["{sweep}", "--by", "precison"], "-> --by precision"),
    ],
)
def test_invalid_report_command_prints_one_problem(sweep, arguments, text, capsys):
    typed = [each.format(sweep=sweep) for each in arguments]
    assert main(["report", *typed]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["x", "--formats", "pdf"]])
def test_wrong_option_exits_with_2(arguments, capsys):
    assert main(["report", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_report_prints_table_if_output_is_not_writable(kind, sweep, tmp_path, monkeypatch, capsys):
    place = tmp_path if kind == "read-only" else tmp_path / "file"
    (tmp_path / "file").write_text("")

    def write(path, *_, **__) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    if kind == "read-only":
        monkeypatch.setattr(report, "write_atomic", write)
    assert main(["report", str(sweep), "--output", str(place)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].startswith("bf16 is fastest")
    assert f"--output = {place}" in captured.err
    assert "-> --output FOLDER" in captured.err
    assert ("Read-only file system" in captured.err) is (kind == "read-only")


@pytest.mark.slow
def test_report_to_a_pipe_has_no_colours_and_imports_no_torch(sweep, tmp_path):
    code = (
        "import sys\nfrom eke.cli import main\n"
        f"assert main(['report', {str(sweep)!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'hydra', 'wandb'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(tmp_path),
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_closed_pipe_causes_no_traceback(sweep, tmp_path):
    command = f"{sys.executable} -m eke report {sweep} --formats none | head -1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=environment(tmp_path), check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stdout.count(os.linesep) == 1
