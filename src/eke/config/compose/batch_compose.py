"""Many configurations that have most in common: the cells of a sweep, each composed once."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from eke.common.errors import ConfigError, Problem
from eke.config.compose.compose_cache import NotSet, Tree, Trees, hydra_state
from eke.config.compose.composer import Composed, compose, open_catalogue, typed_tree
from eke.config.compose.hydra_settings import is_launching

Progress = Callable[[int, int], None]
"""Told how many are done, and of how many."""


class Many:
    """Composes cells; what they share is read and composed once.

    Args:
        config_dir: a folder with the user's own options, beside eke's.

    Raises:
        ConfigError: there is something wrong with that folder.
    """

    def __init__(self, config_dir: Path | None) -> None:
        self._config_dir = config_dir.resolve() if config_dir else None
        self.catalogue = open_catalogue(self._config_dir)
        self.trees = Trees(self.catalogue, self._config_dir)
        self._explained: dict[tuple[str, str], list[Problem]] = {}

    def compose(
        self, cells: Sequence[tuple[str, ...]], progress: Progress | None = None
    ) -> list[Composed]:
        """Every cell, in order. Their overrides are right in themselves.

        Raises:
            ConfigError: what is wrong with any of them; what several have in common, once.
        """
        done: list[Composed] = []
        found: Counter[Problem] = Counter()
        with hydra_state():
            for number, composed in enumerate(self._each(cells, found), start=1):
                done += [composed] if composed else []
                if progress:
                    progress(number, len(cells))
        if found:
            raise ConfigError(counted(found, len(cells)))
        return done

    def tree(self, overrides: Sequence[str]) -> Tree:
        """One tree, not typed: what it lacks may come from elsewhere.

        Raises:
            ConfigError: it cannot be composed.
        """
        try:
            with hydra_state():
                return self.trees.tree(overrides)
        except Exception:
            compose(overrides, self._config_dir, in_sweep=True)  # says what is wrong
            raise

    def _each(
        self, cells: Sequence[tuple[str, ...]], found: Counter[Problem]
    ) -> Iterator[Composed | None]:
        for cell in cells:
            try:
                yield self._one(cell)
            except ConfigError as error:
                found.update(error.problems)
                yield None

    def _one(self, cell: tuple[str, ...]) -> Composed:
        texts = [text for text in dict.fromkeys(cell) if not is_launching(text)]
        try:
            return typed_tree(self.trees.tree(texts), texts, cell, self.catalogue)
        except NotSet as error:
            raise ConfigError(self._explain(error, texts)) from error
        except ConfigError:
            raise
        except Exception:  # Hydra's or OmegaConf's: composed as a whole, it is explained
            return compose(cell, self._config_dir, in_sweep=True)

    def _explain(self, error: NotSet, texts: list[str]) -> list[Problem]:
        """Why values cannot be set; the same value with the same option is explained once."""
        problems = []
        for text in error.texts:
            section = text.lstrip("+").partition(".")[0]
            key = (text, error.choices.get(section, ""))
            if key not in self._explained:
                self._explained[key] = self._explain_one(text, texts)
            problems += self._explained[key]
        return problems

    def _explain_one(self, text: str, texts: list[str]) -> list[Problem]:
        options = [t for t in texts if self.trees.chooses(t)]
        try:
            compose([*options, text], self._config_dir, in_sweep=True)
        except ConfigError as error:
            return error.problems
        key, _, value = text.partition("=")
        return [Problem(key, value, "cannot be set together with the other overrides")]


def counted(found: Counter[Problem], total: int) -> list[Problem]:
    """Each problem once, with the number of cells that have it, if others have not."""
    return [
        p if number >= total else Problem(p.path, p.value, _in_cells(p, number, total), p.fix)
        for p, number in found.items()
    ]


def _in_cells(problem: Problem, number: int, total: int) -> str:
    return f"{problem.why} (in {number} of {total} cells)"
