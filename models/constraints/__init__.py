"""Keeps a network contractive during training: `project(network, contraction, spectral_limit)`."""

from wane.models.constraints.projection import project

__all__ = ["project"]
