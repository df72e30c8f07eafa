"""Whose a session is.

Within, a session goes by its owner's name, a slash, and the id that the owner knows: two owners may each have a session
of one id, and neither has a name for the other's. Where nobody is asked who he is, a session goes by its id alone. No
id holds a slash; so no id of one owner is a name of another's, in whatever store they meet.
"""

from __future__ import annotations

from typing import NamedTuple

from service.engine.requests import check_session_id

SLASH = "/"


class Owner(NamedTuple):
    """Who asks; of no name where nobody is asked. `sessions`: how many it may have; None: as many as there is room
    for."""

    name: str = ""
    sessions: int | None = None


ANYBODY = Owner()


def name_within(owner: str, session: str) -> str:
    """What the owner's session of this id goes by. Raises InvalidRequest for what is no id."""
    check_session_id(session)
    return owner + SLASH + session if owner else session


def id_of(session: str) -> str:
    """The id that the owner of a session knows it by."""
    return session.rpartition(SLASH)[2]


def owner_of(session: str) -> str:
    """Whose a session is."""
    return session.rpartition(SLASH)[0]
