"""The constraint of the linear cell. It is the RNN's constraint, which depends only on the recurrent matrix."""

from wane.models.constraints.cells.rnn import constrain

__all__ = ["constrain"]
