"""Shared parts of the recipes. Importing this package is cheap and changes nothing; `verl_ext.plugin` registers."""

__version__ = "0.1.0"

# The range the extension points were read and run in; pyproject.toml asks for the same.
SUPPORTED_VERL = ">=0.9.0,<0.10"
