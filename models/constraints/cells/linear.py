"""The constraint of the linear cell: the RNN's, which bounds the recurrent matrix alone."""

from wane.models.constraints.cells.rnn import constrain

__all__ = ["constrain"]
