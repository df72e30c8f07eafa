"""Keeping a network contractive while it trains: `project(network, contraction, spectral_limit)`."""

from wane.models.constraints.projection import project

__all__ = ["project"]
