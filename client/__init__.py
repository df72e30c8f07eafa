"""A client of Wane's servers that survives lost connections, restarts and lost servers.

    from wane_client import Wane

    Wane("http://127.0.0.1:8000").predict("The history of the").predictions[0].token

The package `wane` has the same files as `wane.client`.
"""

from .answers import *  # noqa: F403
from .blocking import Generation, Session, Wane
from .errors import *  # noqa: F403
from .session import AsyncSession
from .wane import AsyncGeneration, AsyncWane

__all__ = ["AsyncGeneration", "AsyncSession", "AsyncWane", "Generation", "Mode", "Session", "Wane"]  # noqa: F405
__all__ += [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and value.__module__ in (f"{__name__}.answers", f"{__name__}.errors")
]
