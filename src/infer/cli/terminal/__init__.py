"""A terminal: streams, signals, styles, and lines that are wrapped and hidden."""
