"""The numpy oracle of the cells. Each cell has one file, which `models/cell_registry.py` imports.

Each file states the cell's equations and defines `step(cell, x, state)`, which computes one token for a batch. Its
arguments are the cell's weights, the input x (B, I) and the state tensors, (B, H) each. It returns the next state,
whose first tensor is the output. `sigma` is the logistic function, and `*` is elementwise. U and b are the weight and
the bias for the input, W and d those for the state.
"""
