"""`eke fit`: candidates on paper, then a few short trials, and the best written."""

from eke.app.fitting.keeping import keep
from eke.app.fitting.preparing import prepare
from eke.app.fitting.trying import Wish
from eke.app.talk import complain, say
from eke.errors import EkeError, of_system
from eke.fit import likely
from eke.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE

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
