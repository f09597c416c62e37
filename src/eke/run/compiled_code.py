"""Where compiled code is kept: in a folder of this user's alone, since it runs as this user.

PyTorch would use `/tmp/torchinductor_USER`, even if another user made it. The folder is
local: a home folder is often shared by machines whose processors differ.
"""

import os
import tempfile
from pathlib import Path

from eke.corpus import cache_folder
from eke.errors import ConfigError, Problem
from eke.files import own_folder

FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variable that PyTorch or Triton reads -> name of a folder."""


def choose_compiled_code_folders() -> None:
    """Set the variables that are not set, and check the folders of those that are.

    Raises:
        ConfigError: a folder that was asked for is another user's.
    """
    local = Path(tempfile.gettempdir()) / f"eke-{os.geteuid()}"
    for variable, name in FOLDERS.items():
        if given := os.environ.get(variable):
            try:
                own_folder(Path(given), private=True)
            except OSError as error:
                why = f"{error.strerror}; compiled code in it would run as you"
                fix = f"export {variable}=FOLDER_OF_YOURS"
                raise ConfigError(Problem(variable, given, why, fix)) from error
            continue
        try:
            folder = own_folder(own_folder(local, private=True) / name, private=True)
        except OSError:  # another user made something of that name first
            folder = own_folder(cache_folder() / name, private=True)
        os.environ[variable] = str(folder)
