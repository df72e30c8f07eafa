"""A client of Wane's servers that survives lost connections, restarts and lost servers.

    from wane_client import Wane

    Wane("http://127.0.0.1:8000").predict("The history of the").predictions[0].token

The package `wane` has the same files as `wane.client`.
"""

from .answers import *  # noqa: F403
from .errors import *  # noqa: F403
from .wane import *  # noqa: F403
