"""The numpy oracle of every cell: one file per cell, found by `models/cell_registry.py`.

Each file states the cell's equations and defines `step(cell, x, state)`, one token for a batch: the cell's weights,
x (B, I) and the state, (B, H) each -> the next state, the output first. `sigma` is the logistic function, `*` is
elementwise; U and b apply to the input, W and d to the state.
"""
