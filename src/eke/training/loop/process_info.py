"""What the operating system knows about this process; no torch."""

import os
import resource
import time


def resident_bytes() -> int | None:
    """Resident memory now; None where /proc does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def end_first() -> None:
    """Have the kernel end this process before any other when the machine's memory is short (Linux).

    See proc(5), oom_score_adj: 1000 is the most, and raising it needs no privilege.
    """
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # not Linux, or not allowed: it is ended in its turn
        return


def process_peak() -> int:
    """Highest resident memory so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_since_start() -> float | None:
    """Seconds since this process was started; None where /proc does not tell."""
    try:
        with open("/proc/self/stat") as file:
            started = float(file.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return None
