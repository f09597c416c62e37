"""Whether W&B will find an API key: looked up where W&B looks, without importing it.

Tells only what is certain: where this finds none, W&B (0.31) does not either.
"""

import contextlib
import netrc
import os
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import Path
from urllib.parse import urlsplit

VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
PUBLIC_HOSTS = ("api.forge.coreweave.com", "forge.coreweave.com", "api.wandb.ai")
"""W&B's own service under its names; keys of each are taken for the others."""


def has_wandb_key() -> bool:
    """Whether an API key, or a token's file, is set for W&B's server."""
    if any(os.environ.get(name) for name in VARIABLES):
        return True
    settings = _read_settings()
    if settings.get("api_key") or settings.get("identity_token_file"):
        return True
    base_url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url", "")
    hosts = (urlsplit(base_url).netloc,) if base_url else PUBLIC_HOSTS
    if set(hosts) & set(PUBLIC_HOSTS):
        hosts = PUBLIC_HOSTS
    return any(_netrc_has(host) for host in hosts)


def _netrc_has(host: str) -> bool:
    """Whether the netrc file, where there is one, has a password for the host."""
    named = os.environ.get("NETRC")
    home = Path.home()
    candidates = [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]
    for path in candidates:
        try:
            found = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if found and found[2]:
            return True
    return False


def _read_settings() -> dict[str, str]:
    """W&B's settings file of this user. The current folder's, `wandb/settings`, is not his word."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    parser = ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ConfigParserError, UnicodeDecodeError):
        parser.read(folder / "settings")
    return dict(parser["default"]) if parser.has_section("default") else {}
