"""The constraints of the cells during training. Each kind that needs one has a file, which
`models/layer_parts.py` imports.

Each file defines `constrain(layer, target)`. It changes the weights of a layer in place so that the layer's contraction
factor is at most `target`. It returns the greatest |h| of each unit, (H) float64, or None if unknown. The weights of a
layer whose factor is already at most `target` are not changed, and no weight grows.
"""
