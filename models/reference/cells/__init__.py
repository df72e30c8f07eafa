"""The numpy oracle of the cells. Each cell has one file, which `models/cell_registry.py` imports.

Each file states the cell's equations and defines `step(cell, x, state)`, which computes one token for a batch. Its
arguments are the cell's weights, x (B, I) and the state, (B, H) each. It returns the next state, whose first tensor is
the output. `sigma` is the logistic function, and `*` is elementwise. U and b apply to the input, W and d to the state.
"""
