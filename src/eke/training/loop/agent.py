"""Start the ranks: `python -m eke.training.loop.agent RUN_DIR PROCESSES [NODE NODES HOST:PORT]`.

Works as torchrun, and records the rank that failed first. Signals are forwarded to the ranks, which
agree on the step to stop after. If a rank fails, torch's agent ends the other ranks of its node. On
one node, agent and ranks meet in files that only this user can read, since torch's store unpickles
data from any connection. Several nodes must listen on the network (docs/how-to/security.md).
"""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from eke.common.output import open_streams
from eke.common.paths import AGENT, RENDEZVOUS_VARIABLE, SUPERVISOR, RunPaths
from eke.common.plugins import TRAINING_WORKER
from eke.common.process_env import end_with_parent, module_command
from eke.hardware import usable_cores
from eke.plan.record import EXIT_FAILED, DeadRank, read_attempts, write_end

_FORWARDED = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"
"""Signals that request a stop."""

_STOP_TIMEOUT_S = 24 * 3600
"""Seconds for the ranks to save after a stop request. A second signal kills agent and ranks."""


def _main(arguments: list[str]) -> int:
    paths, num_processes = RunPaths(Path(arguments[0]).absolute()), int(arguments[1])
    node, num_nodes, endpoint = arguments[2:] or ("0", "1", "")
    end_with_parent(signal.SIGTERM, os.environ.get(SUPERVISOR, ""))
    os.environ[AGENT] = str(os.getpid())
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_STOP_TIMEOUT_S)
    # If each rank used all cores, the ranks would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_processes)))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # the record explains the failure
            logging.getLogger(name).setLevel(logging.CRITICAL)
    meeting = "" if endpoint else tempfile.mkdtemp(prefix="eke-ranks-")  # mode 0700
    config = _launch_config(num_processes, int(node), int(num_nodes), endpoint, meeting)
    try:
        worker = module_command(TRAINING_WORKER, str(paths.folder))
        elastic_launch(config, worker[0])(*worker[1:])
        return 0
    except SignalException:
        return EXIT_FAILED  # rank 0 has written the record
    except ChildFailedError as error:
        rank = first_failed_rank({r: (f.timestamp, f.exitcode) for r, f in error.failures.items()})
        attempt = max(0, len(read_attempts(paths)) - 1)
        write_end(paths, DeadRank(attempt, rank, error.failures[rank].exitcode, int(node)))
        return EXIT_FAILED
    finally:
        if meeting:
            shutil.rmtree(meeting, ignore_errors=True)


def _launch_config(
    num_processes: int, node: int, num_nodes: int, endpoint: str, meeting: str
) -> LaunchConfig:
    # Several nodes have fixed numbers: the run folder's lease belongs to the node of rank 0, while
    # torch's elastic rendezvous numbers nodes in any order.
    backend, found_at = "static", endpoint
    settings: dict[str, Any] = {"rank": node}
    if meeting:
        backend, found_at, settings = "c10d", f"{meeting}/agent", {"store_type": "file"}
        # Keep torch's agent, gloo and NCCL off the network.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ |= {
            RENDEZVOUS_VARIABLE: f"{meeting}/ranks",
            # Otherwise the agent makes a store for its ranks that listens on all addresses.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
        }
    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_processes,
        run_id=endpoint or str(os.getpid()),
        max_restarts=0,  # instead, a later attempt resumes from the checkpoint
        signals_to_handle=_FORWARDED,
        rdzv_backend=backend,
        rdzv_endpoint=found_at,
        rdzv_configs=settings,
    )


def first_failed_rank(ends: Mapping[int, tuple[int, int]]) -> int:
    """Return the rank that failed first, from each rank's failure time (seconds) and exit code.

    In one second a rank killed by a signal is preferred, then any rank but 0, which reports itself.
    """
    return min(ends, key=lambda rank: (ends[rank][0], ends[rank][1] >= 0, rank == 0, rank))


if __name__ == "__main__":
    open_streams("utf-8")
    code = _main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
