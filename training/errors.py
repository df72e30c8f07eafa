"""The errors of training. The command line prints the message and exits with 2.

TrainingError (ValueError)
├── ConfigError      an invalid experiment file
├── DataError        an invalid corpus
├── ForeignError     an unusable foreign checkpoint or vocabulary
└── RunError         an unusable run folder, or a bundle that could not be written
    ├── ResumeError  a run that cannot be resumed
    └── LostError    another process of the group was lost; exits with 1
"""

from __future__ import annotations


class TrainingError(ValueError):
    """The input is invalid. The message names the file and the fault."""


class ConfigError(TrainingError):
    """An experiment file that cannot be used."""


class DataError(TrainingError):
    """Training data that cannot be used."""


class ForeignError(TrainingError):
    """A foreign checkpoint or vocabulary that Wane cannot read or express."""


class RunError(TrainingError):
    """A run folder that cannot be used, or a bundle that could not be written."""


class ResumeError(RunError):
    """A run folder that holds no run, or a different run."""


class LostError(RunError):
    """Another process of the group was lost."""
