"""The constraint of every cell during training: one file per cell, found by `models/cell_registry.py`.

Each file defines `constrain(layer, target)`, which changes the weights of a layer in place so that it is contractive by
at most `target`. It returns the greatest |h| of each unit, (H) float64, or None if unknown. Weights within the bound
are not changed, and no weight grows.
"""
