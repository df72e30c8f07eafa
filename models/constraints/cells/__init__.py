"""Keeping every cell contractive while it trains: one file per cell, found by `models/cell_registry.py`.

Each file defines `constrain(layer, target)`, which changes the weights of a layer in place so that it is contractive by
at most `target`. It returns the greatest |h| of each unit, (H) float64, or None if it does not know. Weights that are
within the bound are not touched, and nothing is ever inflated.
"""
