"""`wane rollback`: withdraws a model's newest version, so that the version before it is served again.

Renames the folder of the newest version, for example from `shop/3` to `shop/3.withdrawn`. To undo the command, rename
the folder back. Servers that poll the folder load the version before the withdrawn one. Live sessions continue on that
version.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from wane.arguments import Parser
from wane.service.registry.repository import RegistryError, Repository
from wane.service.settings import Settings, SettingsError

FAILURES = (RegistryError, SettingsError, OSError)


def main(arguments: Sequence[str]) -> int:
    """Runs the command. `arguments[0]` is the command's name."""
    parser = Parser("wane rollback", description=__doc__)
    parser.add_argument("model", metavar="NAME", help="the model's name")
    parser.add_argument(
        "--bundles",
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help="the servers' folder of bundles (default: WANE_BUNDLES)",
    )
    options = parser.parse_args(arguments[1:])
    settings = Settings.read(os.environ, options)
    withdrawn, served, folder = Repository(settings.bundles).withdraw(options.model)
    print(  # noqa: T201
        f"withdrew version {withdrawn.version} of {withdrawn.name}: {withdrawn.folder} is now {folder}\n"
        f"the newest version is {served.version}; servers load it at their next poll of the folder "
        f"(model_poll_interval_s), at POST /v2/repository/models/{served.name}/load, or when they start"
    )
    return 0
