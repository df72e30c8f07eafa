"""`wane serve`: serves the models until SIGTERM or SIGINT."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile

from wane.arguments import Parser, printable
from wane.service import server
from wane.service.sessions.stores.store import UnsavedSessions
from wane.service.settings import Settings, SettingsError
from wane.service.workers import supervisor

FAILURES = server.FAILURES


def main(arguments: Sequence[str]) -> int:
    """Runs the command. `arguments[0]` is the command's name."""
    parser = Parser("wane serve", description="Serves models over HTTP. Every setting is also a variable WANE_...")
    Settings.add_arguments(parser)
    settings = Settings.read(os.environ, parser.parse_args(arguments[1:]))
    server.refuse_more_workers(os.environ)
    check_address(settings)
    check_session_file(settings)
    if sys.stdout.isatty() and sys.stderr.isatty() and "log_level" not in settings.model_fields_set:
        settings = settings.model_copy(update={"log_level": "warning"})  # so that the line `ready:` stands alone
    workers = len(os.sched_getaffinity(0)) if settings.workers == "auto" else settings.workers
    try:
        if workers > 1:
            return supervisor.run(settings, arguments[1:], workers)
        if settings.session_file is not None and supervisor.parts_of(settings.session_file):
            supervisor.spread(settings.session_file, 1)
            supervisor.gather(settings.session_file)
        server.run(settings)
    except UnsavedSessions as error:
        print(printable(f"error: {error}"), file=sys.stderr)  # noqa: T201
        return server.UNSAVED
    return 0


def check_address(settings: Settings) -> None:
    """Raises SettingsError if the server cannot listen, before any model is loaded."""
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except UnicodeError as error:
        raise SettingsError(f"--host {host!r} is not a host's name or address") from error
    except OSError as error:
        advice = "give another --host"
        if error.errno == errno.EADDRINUSE:
            advice = "stop the other server, or give another --port"
        elif isinstance(error, PermissionError):
            advice = "give a --port of 1024 or more"
        raise SettingsError(f"cannot listen on {host}, port {port}: {error.strerror}; {advice}") from error


def check_session_file(settings: Settings) -> None:
    """Raises SettingsError if the sessions could not be written to `session_file` at the end."""
    if settings.session_file is None:
        return
    folder = settings.session_file.parent
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"--session-file {settings.session_file}: {folder} cannot be written to: {error.strerror}; name a file in "
            "a folder that can"
        ) from error
