"""What Receiver keeps, and the only place that knows SQLite."""
