"""What can be wrong with what a user gives to training. The command line prints the message and exits with 2.

TrainingError (ValueError)
├── ConfigError      an experiment file
├── DataError        a corpus
├── ForeignError     a checkpoint or vocabulary from elsewhere
└── RunError         a run folder, or a bundle that could not be written from it
    ├── ResumeError  a run folder that cannot be gone on with
    └── LostError    the other processes of a group, gone while it trained; exits with 1
"""

from __future__ import annotations


class TrainingError(ValueError):
    """The input was at fault; the message names the file and what is wrong where."""


class ConfigError(TrainingError):
    """An experiment file that cannot be used."""


class DataError(TrainingError):
    """Training data that cannot be used."""


class ForeignError(TrainingError):
    """A checkpoint or vocabulary from elsewhere that Wane cannot express, or not understand."""


class RunError(TrainingError):
    """A run folder that cannot be used, or a bundle that could not be written."""


class ResumeError(RunError):
    """A run folder that holds another run, or none."""


class LostError(RunError):
    """Another process of the group is gone."""
