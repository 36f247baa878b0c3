"""Attempts to break the promise: power cuts, kills, faults, hostile input; `make proof`."""
