"""A stream trains the same however it is cut or stopped, and as its rows stand in the files."""

import pandas
import pytest
from equivalence_compare import curve, largest_difference
from prepared import write_jsonl
from support import TINY, last_wins
from trained import continue_job, record_of

SHORT = (
    "model=tiny", "data.streaming=true", "data.shuffle_buffer=16", "data.seq_len=24",
    "data.num_eval_samples=7", "train.steps=9", "train.log_every=4", "train.checkpoint_every=null",
    "train.save_final=false", "optimizer.lr=3e-3", "batch.per_device=12",
)  # fmt: skip
CASES = {
    "causal_lm": (),
    "masked_lm": ("model=tiny_bert", "task=masked_lm"),
    "classification": ("model=tiny_bert", "task=sequence_classification"),
    "padding-free": ("data.packing=padding_free",),
    "given epochs": ("data.num_samples=25", "train.steps=null", "train.epochs=4"),
}
"""Each reads the rows more than twice."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Format -> folder of two files with 31 and 16 rows."""
    root = tmp_path_factory.mktemp("rows")
    for name in ("jsonl", "parquet", "csv"):
        (root / name).mkdir()
    for part, count in enumerate((31, 16)):
        rows = [
            {"text": f"file {part} row {n} " + "word " * (n % 5), "label": n % 2}
            for n in range(count)
        ]
        write_jsonl(root / "jsonl" / f"{part}.jsonl", rows)
        frame = pandas.DataFrame(rows)
        frame.to_parquet(root / "parquet" / f"{part}.parquet")
        frame.to_csv(root / "csv" / f"{part}.csv", index=False)
    return root


@pytest.fixture
def streamed(folders, prepared_here):
    """Overrides of a stream of two files of rows."""
    rows = ("data=jsonl", f"data.path={folders}/jsonl")
    return lambda *overrides: last_wins(*SHORT, *TINY, *rows, *overrides)


@pytest.mark.parametrize("case", CASES)
def test_micro_batch_size_does_not_change_training(case, streamed, curve_of, baseline_of) -> None:
    base = streamed(*CASES[case])
    whole = baseline_of(*base)
    cut = curve_of(*last_wins(*base, "batch.per_device=3", "batch.accumulation=4"))
    assert largest_difference(whole, cut) < 1e-5
    assert whole[0][0] != whole[-1][0], "the loss never moved"


@pytest.mark.parametrize("other", ["parquet", "csv", "hub"])
def test_file_format_does_not_change_training(
    other, streamed, folders, curve_of, baseline_of
) -> None:
    base = streamed()
    place = f"data.path={folders}/{other}" if other != "hub" else f"data.name={folders}/jsonl"
    typed = [word for word in base if not word.startswith(("data=", "data.path"))]
    assert baseline_of(*base) == curve_of(*typed, f"data={other}", place)


@pytest.mark.parametrize("more", ["engine=trainer", "dataloader.workers=1"])
def test_engine_and_loader_processes_do_not_change_training(
    more, streamed, curve_of, baseline_of
) -> None:
    assert baseline_of(*streamed()) == curve_of(*streamed(more))


@pytest.mark.parametrize("case", ["given epochs", "masked_lm"])
def test_resumed_stream_is_bit_exact(case, streamed, job_of, tmp_path) -> None:
    whole = job_of("whole", *streamed(*CASES[case], "train.checkpoint_every=6"))
    again = continue_job(whole, 6, tmp_path / "again")
    assert curve(again) == curve(whole)[6:]
    assert record_of(again).effective["rows_skipped"] == 0
