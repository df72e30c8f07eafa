"""A client of Wane's servers that survives lost connections, restarts and lost servers.

    from wane_client import Wane

    Wane("http://127.0.0.1:8000").predict("The history of the").predictions[0].token

The package `wane` has the same files as `wane.client`.
"""

from .answers import *  # noqa: F403
from .errors import *  # noqa: F403
from .wane import *  # noqa: F403

__all__ = ["Mode"]  # noqa: F405
__all__ += [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and value.__module__ in {f"{__name__}.{part}" for part in ("answers", "errors", "wane")}
]
