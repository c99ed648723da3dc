"""The command line, one module per subcommand. The container start path does not import this package."""

from .main import main

__all__ = ["main"]
