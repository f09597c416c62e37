"""A stream trains the same however it is cut or stopped, and as its rows stand in the files."""

import pytest
from equivalence_compare import curve, largest_difference
from prepared import write_jsonl
from support import TINY, last_wins
from trained import continue_job, record_of

SHORT = (
    "model=tiny", "data.streaming=true", "data.shuffle_buffer=16", "data.seq_len=24",
    "data.num_eval_samples=7", "train.steps=24", "train.log_every=5", "train.checkpoint_every=null",
    "train.save_final=false", "optimizer.lr=3e-3", "batch.per_device=12",
)  # fmt: skip
CASES = {
    "causal_lm": ("data=jsonl",),
    "masked_lm": ("data=jsonl", "model=tiny_bert", "task=masked_lm"),
    "classification": ("data=jsonl", "model=tiny_bert", "task=sequence_classification"),
    "padding-free": ("data=jsonl", "data.packing=padding_free"),
    "csv": ("data=csv",),
    "parquet": ("data=parquet",),
    "hub": ("data=hub",),
    "several epochs": ("data=jsonl", "train.steps=40"),
    "given epochs": ("data=jsonl", "data.num_samples=50", "train.steps=null", "train.epochs=5"),
}


@pytest.fixture
def streamed(tmp_path):
    """Overrides of a stream of two files with 131 and 30 rows."""

    def make(*overrides: str) -> tuple[str, ...]:
        folder = tmp_path / "data"
        folder.mkdir()
        for part, count in enumerate((131, 30)):
            rows = [
                {"text": f"file {part} row {n} " + "word " * (n % 5), "label": n % 2}
                for n in range(count)
            ]
            path = write_jsonl(folder / f"{part}.jsonl", rows)
            if "data=parquet" in overrides or "data=csv" in overrides:
                import pandas

                frame = pandas.DataFrame(rows)
                frame.to_parquet(path.with_suffix(".parquet"))
                frame.to_csv(path.with_suffix(".csv"), index=False)
        place = "name" if "data=hub" in overrides else "path"
        return last_wins(*SHORT, *TINY, *overrides, f"data.{place}={folder}")

    return make


@pytest.mark.parametrize("case", CASES)
def test_each_cut_trains_the_same(case, streamed, curve_of) -> None:
    base = streamed(*CASES[case])
    whole = curve_of(*base)
    cut = curve_of(*last_wins(*base, "batch.per_device=3", "batch.accumulation=4"))
    assert largest_difference(whole, cut) < 1e-5
    assert whole[0][0] != whole[-1][0], "the loss never moved"


def test_a_stream_of_the_hub_is_that_of_its_files(streamed, curve_of) -> None:
    base = streamed("data=jsonl")
    folder = base[-1].removeprefix("data.path=")
    assert curve_of(*base) == curve_of(*base[:-1], "data=hub", f"data.name={folder}")


@pytest.mark.parametrize("more", ["engine=trainer", "dataloader.workers=1"])
def test_engines_and_loader_processes_do_not_matter(more, streamed, curve_of) -> None:
    base = streamed(*CASES["several epochs"])
    assert curve_of(*base) == curve_of(*base, more)


@pytest.mark.parametrize("case", ["several epochs", "given epochs", "masked_lm"])
def test_continued_it_goes_on_to_the_last_bit(case, streamed, job_of, tmp_path) -> None:
    more = ("train.checkpoint_every=7", "train.keep_checkpoints=9")
    whole = job_of("whole", *last_wins(*streamed(*CASES[case]), *more))
    again = continue_job(whole, 14, tmp_path / "again")
    assert curve(again) == curve(whole)[14:]
    assert record_of(again).effective["rows_skipped"] == 0
