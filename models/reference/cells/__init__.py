"""The oracle of every cell, in numpy: one file per cell, found by `models/cell_registry.py`.

Each file states the cell's equations and defines `step(cell, x, state)`, one token for a batch: the cell's weights,
x (B, I) and the state before, (B, H) each -> the state after, the output first. `sigma` is the logistic function, `*`
is elementwise; U and b meet the input, W and d the state.
"""
