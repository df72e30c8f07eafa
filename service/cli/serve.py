"""`wane serve`: serves the models until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from wane.models.bundle import BundleError
from wane.service import server
from wane.service.auth.keys import KeysError
from wane.service.registry.registry import RegistryError
from wane.service.runners.runner import DeviceError
from wane.service.sessions.stores.store import StoreError
from wane.service.settings import Settings, SettingsError

FAILURES = (SettingsError, RegistryError, KeysError, StoreError, BundleError, DeviceError, OSError, UnicodeError)


def main(arguments: Sequence[str]) -> int:
    """Runs the command. `arguments[0]` is the command's name."""
    parser = argparse.ArgumentParser(
        "wane serve", description="Serves models over HTTP. Every setting is also a variable WANE_..."
    )
    Settings.add_arguments(parser)
    settings = Settings.read(os.environ, parser.parse_args(arguments[1:]))
    server.refuse_more_workers(os.environ)
    server.run(settings)
    return 0
