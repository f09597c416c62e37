"""Whether batches came the way that was asked for: read from the loaders at work."""

from typing import Any

from eke.config.schema import Packing
from eke.models.sizes import is_ragged
from eke.training.loop.state import Job


def note_loading(job: Job) -> None:
    """Loader processes that live, batches they work ahead, and the memory batches came in."""
    loading, config = job.data.loading, job.plan.config.dataloader
    workers, kept = _living(loading.training), _living_of_evaluation(job)
    job.effective["loader_workers"] = workers
    job.effective["loader_batches_ahead"] = workers * _prefetch(loading.training)
    job.effective["loader_workers_kept"] = kept
    job.effective["loader_pinned"] = bool(loading.pinned)
    if workers < config.workers:
        job.warn(f"dataloader.workers = {config.workers}: {workers} loader processes live")
    if config.persistent and not kept:
        job.warn("dataloader.persistent had no effect: evaluation's loader processes have ended")
    if job.plan.compute.pin_memory and not loading.pinned:
        job.warn("dataloader.pin_memory had no effect: batches came in pageable memory")


def note_packing(job: Job) -> None:
    """How many sequences shared a row, in all steps of this attempt."""
    packing, shared = job.plan.config.data.packing, job.data.padding.sequences_per_row
    if shared is not None:
        job.effective["sequences_per_row"] = shared
    if packing is Packing.off or not is_ragged(job.plan.config):
        return  # of samples that are all as long, a rule has warned before the start
    if shared is None or shared <= 1:
        job.warn(f"data.packing={packing.value} had no effect: no row held two sequences")


def _living(iterator: Any) -> int:
    """Processes behind a DataLoader's iterator (torch 2.13 names them `_workers`)."""
    return sum(process.is_alive() for process in getattr(iterator, "_workers", ()))


def _prefetch(iterator: Any) -> int:
    """Batches that each process prepares ahead."""
    return int(getattr(iterator, "_prefetch_factor", None) or 0)


def _living_of_evaluation(job: Job) -> int:
    loader = job.data.loading.evaluation
    return _living(getattr(loader, "_iterator", None))
