"""Receives webhooks, verifies them, and applies each business change once."""

from receiver.said import Park, Quarantine

__all__ = ["Park", "Quarantine"]
__version__ = "0.1.0"
