"""The numpy oracle of the layers' cells. Each kind has one file, which `models/layer_parts.py` imports.

Each file states the cell's equations and defines `step(cell, x, state)`, which computes one token for a batch. Its
arguments are the cell's weights, the input x (B, I) and the state tensors. It returns the next state. The output of a
cell with fading memory is the first tensor of its state, (B, H). A cell with finite memory returns its output before
the state. `sigma` is the logistic function, and `*` is elementwise. U and b are the weight and the bias for the input,
W and d those for the state.
"""
