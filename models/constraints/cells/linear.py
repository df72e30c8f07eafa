"""The constraint of the linear cell. It is the same as the RNN's, which bounds only the recurrent matrix."""

from wane.models.constraints.cells.rnn import constrain

__all__ = ["constrain"]
