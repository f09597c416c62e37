"""`eke fit`: candidates on paper, then a few short trials, and the best written."""

from eke.common.errors import EkeError, of_system
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE
from eke.tuning.search import likely
from eke.workflows.autotune.save_result import keep
from eke.workflows.autotune.session import Wish
from eke.workflows.autotune.setup import prepare
from eke.workflows.console import complain, say

__all__ = ["Wish", "fit"]


def fit(wish: Wish) -> int:
    """Search, and write what was found; returns the exit code."""
    try:
        fitting = prepare(wish)
        if fitting.baseline.config.plan_only:
            return say("\n" + likely(fitting.candidates, fitting.search, fitting.baseline))
        found = fitting.run()
        keep(fitting, found)
        return EXIT_OK if found.best is not None else EXIT_FAILED
    except EkeError as error:
        return complain(str(error), error.exit_code)
    except OSError as error:
        return complain(of_system(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return complain("\ninterrupted; the same command continues", EXIT_RESUMABLE)
