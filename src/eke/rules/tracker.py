"""Rules about trackers."""

import contextlib
import netrc
import os
import re
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import Path
from urllib.parse import urlsplit

from eke.common.errors import Fix
from eke.common.paths import user_path
from eke.common.text import format_value, override
from eke.config.schema import TrackerMode
from eke.rules.rule import Rule, RuleInputs, configured, without_effect

_PUBLIC_HOSTS = ("api.forge.coreweave.com", "forge.coreweave.com", "api.wandb.ai")
"""Host names of W&B's own service. A key of one host is valid for all."""


def has_wandb_key() -> bool:
    """Return whether an API key or a token file is set for W&B's server."""
    # Search the same places as W&B (0.31), without importing it.
    settings = _read_settings()
    for key in ("api_key", "identity_token_file"):
        if os.environ.get(f"WANDB_{key.upper()}") or settings.get(key):
            return True
    base_url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url", "")
    host = urlsplit(base_url).netloc if base_url else _PUBLIC_HOSTS[0]
    return any(map(_netrc_has, _PUBLIC_HOSTS if host in _PUBLIC_HOSTS else (host,)))


def _netrc_has(host: str) -> bool:
    named = os.environ.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            found = netrc.netrc(user_path(path)).authenticators(host)
            if found and found[2]:
                return True
    return False


def _read_settings() -> dict[str, str]:
    """Return this user's W&B settings. `wandb/settings` of the current folder is not trusted."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or user_path("~/.config/wandb"))
    parser = ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ConfigParserError, UnicodeDecodeError):
        parser.read(folder / "settings")
    return dict(parser["default"]) if parser.has_section("default") else {}


def _tracker(facts: RuleInputs) -> str:
    return facts.config.tracker.option


def _store(uri: str) -> str:
    """Return the probable URI: a server without its scheme, otherwise a file."""
    server = re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri)
    return f"http://{uri}" if server else "sqlite:///mlflow.db"


def _read_by(tracker: str, key: str, what: str, default: str | None) -> Rule:
    """Return the rule for a key that only one tracker reads."""
    return without_effect(
        key=f"tracker.{key}",
        when=lambda f: _tracker(f) != tracker and configured(f.config, f"tracker.{key}") != default,
        why=lambda f: f"only {tracker} has {what}. tracker={_tracker(f)} ignores it",
        fix=Fix(f"tracker.{key}={format_value(default)}", remark=f"or: tracker={tracker}"),
        source="src/eke/results/trackers",
    )


RULES = dict(
    online_needs_key=Rule(
        key="tracker.mode",
        when=lambda f: (
            not f.planning
            and _tracker(f) == "wandb"
            and f.config.tracker.mode is TrackerMode.online
            and not has_wandb_key()
        ),
        why="no API key for W&B's server in WANDB_API_KEY or netrc. "
        "eke sync uploads offline runs later",
        fix=Fix("tracker.mode=offline", remark="or: wandb login"),
        source="wandb/sdk/lib/wbauth/authenticate.py",
        versions="wandb 0.31",
    ),
    mode_is_wandbs=_read_by("wandb", "mode", "modes", "offline"),
    entity_is_wandbs=_read_by("wandb", "entity", "teams", None),
    uri_is_mlflows=_read_by("mlflow", "uri", "a store URI", None),
    uri_is_no_folder=Rule(
        key="tracker.uri",
        when=lambda f: (
            _tracker(f) == "mlflow"
            and (uri := f.config.tracker.uri) is not None
            and (uri.startswith("file:") or ("://" not in uri and uri != "databricks"))
        ),
        why="needs a URI. MLflow 3.17 does not accept a folder",
        fix=lambda f: Fix(override("tracker.uri", _store(f.config.tracker.uri or ""))),
        source="mlflow/store/tracking/file_store.py",
        versions="mlflow 3.17",
    ),
)
