"""The version. The build imports this file, which imports nothing."""

__version__ = "0.1.0"
