"""How fast Receiver is beside what a user would pick instead: `make bench`."""
