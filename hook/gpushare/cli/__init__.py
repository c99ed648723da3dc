"""The command line. One subcommand, one module; none of this is on the container start path."""

from .main import main

__all__ = ["main"]
